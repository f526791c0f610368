"""The study for real, in its short form: engines, Miles, kept data, report."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from claims import __main__ as runner
from claims.results import load_results
from claims.study import cells, load_study
from rich.console import Console


@pytest.mark.engines
@pytest.mark.miles
def test_the_short_study_runs_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: str(tmp_path / name) for name in ("runs", "data", "docs")}
    study = replace(load_study("claims_short"), **folders)
    console = Console(file=io.StringIO(), width=300)
    monkeypatch.setattr(runner, "load_study", lambda name: study)
    monkeypatch.setattr(runner, "console", console)
    assert runner.main(["study=claims_short"]) == 0, console.file.getvalue()  # type: ignore[attr-defined]
    results = load_results(study)
    assert [result.cell for result in results] == cells(study)
    for result in results:
        assert [signals.update for signals in result.signals] == [0, 1]
        assert all(set(signals.pools) == {"bf16", "fp8", "nvfp4"} for signals in result.signals)
        assert all(signals.kl.value is not None for signals in result.signals)
        assert result.evals[0].update == -1 and len(result.evals) == 2, "the starting model, and once in the run"
    text = (tmp_path / "docs" / "claims_short.md").read_text()
    assert "2 of 2 cells are in" in text and "| 1a | Plain GRPO collapses on mixed samplers. |" in text
