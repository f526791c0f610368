#!/usr/bin/env bash
# The main job, set-up included. Hydra overrides may follow:
#   bash examples/cpu_quickstart/run.sh updates=5 algo=grpo fleet=cpu_homogeneous run_dir=runs/try
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup_environment
cd "$ROOT"
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 PYTHONWARNINGS=ignore
export PYTHONPATH="$ROOT/examples/cpu_quickstart/shims:$ROOT/examples/cpu_quickstart:$ROOT${MILES_SOURCE:+:$MILES_SOURCE}"
exec "$VENV/bin/python" examples/cpu_quickstart/main.py "$@"
