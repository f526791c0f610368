from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from claims.study import STUDIES, Cell, cells, choose, command, config_of, load_study, overrides

from miles_mixprec.config import Algo, Config
from miles_mixprec.errors import ConfigError

NAMES = sorted(path.stem for path in STUDIES.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_of_every_study_is_a_configuration_that_can_run(name: str) -> None:
    study = load_study(name)
    for cell in (cell for cell in cells(study) if cell.seed == study.seeds[0] and cell.arm in study.arms[::5]):
        config = config_of(study, cell)
        assert (config.algo.name, config.seed, config.updates) == (cell.arm, cell.seed, study.updates)
        assert config.guard.action == "warn", "a guard that stops a run would hide how it ends"


def shared_by_arms(config: Config) -> str:
    """All but the algorithm, with the run's folder taken out of the paths in it."""
    return str(replace(config, algo=Algo())).replace(config.run_dir, "")


def test_arms_differ_by_their_algorithm_alone() -> None:
    study = load_study("claims")
    for fleet in study.fleets:
        assert len({shared_by_arms(config_of(study, Cell(arm, fleet, 1))) for arm in study.arms}) == 1


def test_the_claims_study_is_whole() -> None:
    study = load_study("claims")
    assert set(study.arms) == {"grpo", "mis", "sc", "sc_mis", "grpo_top_p", "sc_mis_top_p"}
    assert len(study.seeds) >= 3 and set(study.fleets) == {"mixed", "homogeneous"}
    assert list(study.regimes) == [""], "one frozen regime"
    assert len({cell.name for cell in cells(study)}) == len(cells(study)) == 6 * 2 * len(study.seeds)
    for fleet, pools in study.stand_ins.items():
        assert set(pools) == set(config_of(study, Cell("grpo", fleet, 0)).fleet.pools)


def test_the_search_sees_plain_grpo_on_the_mixed_fleet_only() -> None:
    study = load_study("claims_regime")
    assert study.arms == ["grpo"] and list(study.fleets) == ["mixed"]
    assert len(study.regimes) > 1


def test_one_command_runs_a_cell() -> None:
    study = load_study("claims")
    cell = Cell("sc", "homogeneous", 2)
    assert command(study, cell) == [
        "bash",
        "examples/cpu_quickstart/run.sh",
        *overrides(study, cell),
        "run_dir=runs/claims/claims/sc-homogeneous-s2",
        "run_id=sc-homogeneous-s2",
    ]
    assert overrides(study, cell)[:3] == ["algo=sc", "fleet=cpu_homogeneous", "seed=2"]


def test_a_choice_of_cells() -> None:
    study = load_study("claims")
    assert [c.name for c in choose(study, ["grpo"], ["mixed"], [1])] == ["grpo-mixed-s1"]
    assert choose(study) == cells(study)


def test_a_study_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"study=nothing: no such study; use one of claims, "):
        load_study("nothing")


def test_an_unknown_key(tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text("purpose: x\nupdates: 1\nseeds: [0]\narms: [grpo]\nsteps: 3\n")
    with pytest.raises(ConfigError, match="steps"):
        load_study("odd", folder=tmp_path)
