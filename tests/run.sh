#!/usr/bin/env bash
# Every check, set-up included; what CI runs. Arguments go to pytest.
. "$(dirname "${BASH_SOURCE[0]}")/../examples/cpu_quickstart/setup.sh"
setup_environment
install tests "$ROOT/tests/requirements.txt" -- "$VENV/bin/python" -m pip install --disable-pip-version-check -r "$ROOT/tests/requirements.txt"
if ! command -v redis-server >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update >/dev/null 2>&1 && apt-get install -y --no-install-recommends redis-server >/dev/null 2>&1 || true
fi
command -v redis-server >/dev/null || echo "tests: no redis-server on this machine; its tests will be skipped" >&2
cd "$ROOT"
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 HYPOTHESIS_PROFILE=ci
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/mypy"
exec "$VENV/bin/python" -m pytest "$@"
