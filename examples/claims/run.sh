#!/usr/bin/env bash
# A study of the published claims, set-up included. What is kept is not run again:
#   bash examples/claims/run.sh study=claims
#   bash examples/claims/run.sh study=claims action=list     (or action=report; arms=grpo,sc fleets=mixed seeds=0)
. "$(dirname "${BASH_SOURCE[0]}")/../cpu_quickstart/setup.sh"
setup_environment
cd "$ROOT"
export PYTHONPATH="$ROOT:$ROOT/examples${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
exec "$VENV/bin/python" -m claims "$@"
