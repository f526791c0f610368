"""One engine as a process group that cannot outlive us.

The engine runs under a small reaper process (`python -m miles_mixprec.providers.process GRACE COMMAND...`) that owns
its process group: when the engine ends, when we ask, or when we die (our end of the reaper's stdin closes), the
whole group gets SIGTERM and, after the grace period, SIGKILL.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_NOISE = re.compile(r"^\s*$|^\s+File |^Traceback|warn|^\s+\^|^\s*~|^\[reaper\]|^Killed|^Aborted", re.IGNORECASE)
_BIND = re.compile(r"address already in use", re.IGNORECASE)
_CAUSE = re.compile(r"Error|ERROR|Exception|error:|FATAL|CUDA|out of memory")
_PORTS = range(20000, 32768)  # below Linux's ephemeral range
_PR_SET_PDEATHSIG = 1


class EngineProcess:
    """A running command with its log. Its whole process group ends with `stop` or with this process."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        grace_s: float = 10.0,
    ) -> None:
        self.log = log
        self.grace_s = grace_s
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._reaper = subprocess.Popen(
                [sys.executable, __file__, str(grace_s), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )

    @property
    def returncode(self) -> int | None:
        """Exit status of the engine, None while it runs."""
        return self._reaper.poll()

    def terminate(self) -> None:
        """Ask the group to end; `stop` waits for it."""
        if self._reaper.poll() is None:
            self._reaper.terminate()

    def stop(self) -> None:
        """End the process group: SIGTERM, then SIGKILL after the grace period. Repeatable."""
        self.terminate()
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        try:
            self._reaper.wait(timeout=self.grace_s + 10)
        except subprocess.TimeoutExpired:
            self._reaper.kill()  # takes the engine with it, which asked for that signal
            self._reaper.wait()

    def cause(self) -> str:
        """The most telling line at the end of the log: the last error, else the last line that says something."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 65536))
            lines = [
                line.strip() for line in log.read().decode(errors="replace").splitlines() if not _NOISE.search(line)
            ]
        errors = [line for line in lines if _CAUSE.search(line)]
        bind = [line for line in errors if _BIND.search(line)]  # SGLang goes on for a while and then times out
        return (bind or errors or lines or ["the log is empty"])[-1][:300]


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on, for a process that takes a while to bind it.

    Not of the ephemeral range, from which any client of this machine may be given it meanwhile. Raises EngineError.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    from miles_mixprec.errors import EngineError  # the reaper runs this file by itself

    raise EngineError(f"no free port among {_PORTS.start}-{_PORTS.stop - 1} on {host}; stop what listens there")


def _reap(grace_s: float, command: Sequence[str]) -> int:
    """Run `command` in a group of its own until it ends, SIGTERM arrives, or stdin closes; then end the group."""
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # a handler, not SIG_IGN: exec resets it for the engine
    engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    while not _ended(engine.pid):
        readable, _, _ = select.select([0, wake_read], [], [])
        signals = os.read(wake_read, 64) if wake_read in readable else b""
        if 0 in readable or signal.SIGTERM in signals or signal.SIGINT in signals:
            os.killpg(engine.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while not _ended(engine.pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            break
    os.killpg(engine.pid, signal.SIGKILL)  # the leader is not yet reaped, so the group id cannot have been reused
    status = engine.wait()
    return status if status >= 0 else 128 - status


def _die_with_parent() -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


if __name__ == "__main__":
    sys.exit(_reap(float(sys.argv[1]), sys.argv[2:]))
