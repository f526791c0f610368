"""What the token-level generate hook asks of a multi-turn environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Step:
    """The environment's answer to one reply of the policy.

    observation: text appended verbatim after the reply, chat markup included; "" if nothing follows.
    done: the episode ends here.
    format_error: the reply was not a valid action.
    """

    observation: str = ""
    done: bool = False
    format_error: bool = False


class Environment(Protocol):
    """One episode. Named by `rollout.environment="pkg.mod.Class"`; any exception it raises stops the run."""

    @classmethod
    def from_sample(cls, prompt: str, label: str | None, metadata: dict[str, Any]) -> Environment:
        """A fresh episode for one Miles sample."""

    def step(self, reply: str) -> Step:
        """Act on the policy's reply (text with its stop token)."""

    def grade(self) -> float:
        """The episode's reward, called once, after the last step."""
