"""The runner, with a stand-in for the quickstart that writes a run folder at once."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from claims import __main__ as runner
from claims.results import load_results
from claims.study import Cell, Study, cells, load_study
from rich.console import Console

STAND_IN = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from run_folder import write_run
write_run(Path({run_dir!r}), updates={updates}, algo={algo!r})
print("the run's own output")
sys.exit({status})
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    from dataclasses import replace

    folders = {name: str(tmp_path / name) for name in ("runs", "data", "docs")}
    study = replace(load_study("claims_short"), updates=6, **folders)
    monkeypatch.setattr(runner, "console", Console(file=io.StringIO(), width=300))
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    return study


def stand_in(monkeypatch: pytest.MonkeyPatch, *, failing: str = "", updates: int = 6) -> list[str]:
    started: list[str] = []

    def command(study: Study, cell: Cell) -> list[str]:
        started.append(cell.name)
        code = STAND_IN.format(
            path=sys.path,
            run_dir=f"{study.runs}/{study.name}/{cell.name}",
            updates=updates,
            algo=cell.arm,
            status=3 if cell.arm == failing else 0,
        )
        return [sys.executable, "-c", code]

    monkeypatch.setattr(runner, "command", command)
    return started


def said() -> str:
    assert isinstance(runner.console.file, io.StringIO)
    return runner.console.file.getvalue()


def test_runs_what_is_missing_and_keeps_it(study: Study, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = stand_in(monkeypatch)
    assert runner.run(study, cells(study)[:1]) == []
    assert runner.run(study, cells(study)) == []
    assert started == ["grpo-mixed-s0", "sc_mis_top_p-mixed-s0"], "each cell once"
    assert [r.cell for r in load_results(study)] == cells(study)
    assert "1 of 2 cells are kept" in said()
    log = tmp_path / "runs" / "claims_short" / "grpo-mixed-s0" / "console.log"
    assert log.read_text() == "the run's own output\n"


def test_a_failed_cell_does_not_stop_the_study(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, failing="grpo")
    assert [c.arm for c in runner.run(study, cells(study))] == ["grpo"]
    assert [r.cell.arm for r in load_results(study)] == ["sc_mis_top_p"]
    assert "grpo-mixed-s0 ended with status 3; see " in said()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["studdy=claims"], "studdy=claims: use study=..."),
        (["study=claims", "action=go"], "action=go: use one of run, list, report"),
        (["study=nothing"], "no such study"),
    ],
)
def test_bad_words_are_one_line_errors(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "console", Console(file=io.StringIO(), width=300))
    assert runner.main(words) == 2
    assert said().startswith("error: ") and message in said() and said().count("\n") == 1


def test_list_prints_the_one_command_of_each_chosen_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "console", Console(file=io.StringIO(), width=40))
    assert runner.main(["study=claims", "action=list", "arms=sc", "seeds=1"]) == 0
    lines = said().splitlines()
    assert len(lines) == 2
    cell = f"algo=sc fleet=cpu_quickstart seed=1 updates={load_study('claims').updates} "
    assert lines[0].startswith(f"bash examples/cpu_quickstart/run.sh {cell}")
