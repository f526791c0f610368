# Sourced: makes the environment that the example and the tests share, once, and reuses it afterwards.
#   MIXPREC_VENV     where (default: .venv in the repository)
#   PIP_INDEX_URL, PIP_EXTRA_INDEX_URL   as for pip; on Linux, add https://download.pytorch.org/whl/cpu for the small CPU build of torch
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
VENV="${MIXPREC_VENV:-$ROOT/.venv}"
REQUIREMENTS="$ROOT/examples/cpu_quickstart/requirements"
export MIXPREC_ENGINE_SGLANG="$VENV/sglang-0.5.23"

fail() { echo "setup: $*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.10 python3; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
    "$candidate" -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null || continue
    echo "$candidate"
    return
  done
  fail "no Python 3.10 to 3.12 with the venv module found; install one or set PYTHON to it"
}

# install STAMP FILES... -- COMMAND: run COMMAND unless it already ran with the same FILES.
install() {
  local stamp="$VENV/.$1" wanted
  shift
  local files=()
  while [ "$1" != -- ]; do files+=("$1"); shift; done
  shift
  wanted="$(cat "${files[@]}" | sha256sum)"
  [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
  local free
  free="$(df -Pk "$VENV" | awk 'NR == 2 { print int($4 / 1048576) }')"
  [ "$free" -ge 6 ] || fail "$VENV has $free GiB free and the environment needs 6; free some space or set MIXPREC_VENV"
  echo "setup: $*" >&2
  "$@" >"$VENV/setup.log" 2>&1 || { tail -n 5 "$VENV/setup.log" >&2; fail "that did not work; the whole output is in $VENV/setup.log"; }
  echo "$wanted" >"$stamp"
}

setup_environment() {
  [ -x "$VENV/bin/python" ] || { local python; python="$(find_python)"; "$python" -m venv "$VENV" || fail "cannot make $VENV"; }
  local pip=("$VENV/bin/python" -m pip install --disable-pip-version-check)
  install torch "$REQUIREMENTS/torch.txt" -- "${pip[@]}" -r "$REQUIREMENTS/torch.txt"
  install no-deps "$REQUIREMENTS/no-deps.txt" -- "${pip[@]}" --no-deps -r "$REQUIREMENTS/no-deps.txt"
  install stack "$REQUIREMENTS/stack.txt" -- "${pip[@]}" -r "$REQUIREMENTS/stack.txt"
  install engines "$REQUIREMENTS/engines.txt" -- "${pip[@]}" --no-deps --upgrade --target "$MIXPREC_ENGINE_SGLANG" -r "$REQUIREMENTS/engines.txt"
  if [ -n "${MILES_SOURCE:-}" ]; then
    install miles-source "$REQUIREMENTS/miles-source.txt" -- "${pip[@]}" -r "$REQUIREMENTS/miles-source.txt"
    install sglang-0.5.16 "$REQUIREMENTS/miles-source.txt" -- "${pip[@]}" --no-deps --target "$VENV/sglang-0.5.16" sglang==0.5.16
  fi
  install package "$ROOT/pyproject.toml" -- "${pip[@]}" --no-deps --no-build-isolation -e "$ROOT"
}
