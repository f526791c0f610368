from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from miles_mixprec.errors import EngineError
from miles_mixprec.providers import process
from miles_mixprec.providers.process import EngineProcess, free_port


def test_free_ports_lie_below_what_clients_are_given() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < free_port() < first for _ in range(20))


def test_a_taken_port_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(process, "_PORTS", range(port, port + 1))
    assert free_port() == port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        with pytest.raises(EngineError, match=f"no free port among {port}-{port}"):
            free_port()


@pytest.mark.parametrize(
    ("written", "cause"),
    [
        ("ERROR: [Errno 98] address already in use\nReadTimeoutError: read timeout=10\nbye", "address already in use"),
        ("ValueError: no such model\nbye", "ValueError: no such model"),
        ("hello\nbye", "bye"),
    ],
)
def test_the_cause_of_an_end_is_the_line_that_tells_most(tmp_path: Path, written: str, cause: str) -> None:
    command = [sys.executable, "-c", f"print({written!r}); raise SystemExit(3)"]
    engine = EngineProcess(command, env={}, log=tmp_path / "log")
    engine._reaper.wait(timeout=60)
    engine.stop()
    assert engine.returncode == 3
    assert cause in engine.cause()
