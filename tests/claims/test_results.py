from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from claims.results import ResultError, keep, load_results, missing, path_of
from claims.study import ROOT, Study, cells, config_of, load_study
from run_folder import write_run

from miles_mixprec.guard.collapse import judge
from miles_mixprec.guard.signals import read_signals


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return replace(
        load_study("claims"),
        updates=12,
        seeds=[0],
        arms=["grpo", "sc"],
        runs=str(tmp_path / "runs"),
        data=str(tmp_path / "data"),
    )


def test_kept_data_gives_the_signals_of_the_run(study: Study, tmp_path: Path) -> None:
    cell = cells(study)[0]
    run_dir = tmp_path / "runs" / "claims" / cell.name
    write_run(
        run_dir, updates=12, algo="sc", reward=lambda n: 0.5 if n < 8 else 0.1, kl_growth=lambda n: 1 if n < 8 else 30
    )
    keep(study, cell)
    (result,) = load_results(study)
    assert result.cell == cell
    assert [line.update for line in result.evals] == [-1, 11]
    for kept, logged in zip(result.signals, read_signals(run_dir), strict=True):
        assert kept.kl.value == pytest.approx(logged.kl.value, rel=1e-5)
        assert kept.tail_ratio.value == pytest.approx(logged.tail_ratio.value, rel=1e-5)
        assert kept.pools["fp8"].kl.value == pytest.approx(logged.pools["fp8"].kl.value, rel=1e-5)
        assert kept.reward == logged.reward and kept.grad_norm == logged.grad_norm
    assert judge(study.limits, result.signals)[-1].signs == judge(study.limits, read_signals(run_dir))[-1].signs


def test_only_finished_cells_are_kept(study: Study, tmp_path: Path) -> None:
    cell = cells(study)[0]
    write_run(tmp_path / "runs" / "claims" / cell.name, updates=5)
    with pytest.raises(ResultError, match="5 of 12 updates"):
        keep(study, cell)
    assert missing(study, cells(study)) == cells(study)


def test_a_kept_cell_is_not_missing(study: Study, tmp_path: Path) -> None:
    cell = cells(study)[1]
    write_run(tmp_path / "runs" / "claims" / cell.name, updates=12)
    keep(study, cell)
    assert missing(study, cells(study)) == [c for c in cells(study) if c != cell]


def test_data_of_an_earlier_study_is_refused(study: Study, tmp_path: Path) -> None:
    cell = cells(study)[0]
    write_run(tmp_path / "runs" / "claims" / cell.name, updates=12)
    keep(study, cell)
    with pytest.raises(ResultError, match="the study has changed"):
        load_results(replace(study, updates=11))


def test_cells_that_ran_in_another_configuration_are_refused(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cell, rate in zip(cells(study)[::2], (1e-4, 2e-4), strict=True):
        write_run(tmp_path / "runs" / "claims" / cell.name, updates=12, algo=cell.arm)
        made = replace(config_of(study, cell), learning_rate=rate)
        monkeypatch.setattr("claims.results.config_of", lambda study, cell, made=made: made)
        keep(study, cell)
    with pytest.raises(ResultError, match="another configuration than grpo-mixed-s0"):
        load_results(study)


def test_kept_files_name_no_machine(study: Study, tmp_path: Path) -> None:
    import zstandard

    cell = cells(study)[0]
    write_run(tmp_path / "runs" / "claims" / cell.name, updates=12)
    keep(study, cell)
    assert str(ROOT).encode() not in zstandard.decompress(path_of(study, cell).read_bytes())
