"""The published claims about mixed-precision reinforcement learning, re-run small on the real stack and judged."""
