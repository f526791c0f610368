"""A study: the same task, model and budget for every arm, fleet and seed.

A cell is one run of the quickstart's main job. Cells differ by what their algorithm, fleet and seed define and by
nothing else; a study that searches a regime also varies named sets of overrides.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from miles_mixprec.config import Config, Guard, load
from miles_mixprec.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
STUDIES = Path(__file__).parent / "studies"
QUICKSTART = ROOT / "examples" / "cpu_quickstart"


@dataclass
class Study:
    """`studies/<name>.yaml`."""

    name: str
    purpose: str
    updates: int
    seeds: list[int]
    arms: list[str]
    fleets: dict[str, str]  # mixed, homogeneous -> configuration
    regimes: dict[str, list[str]]  # named overrides of the quickstart
    notes: str = ""  # of the report: how the regime came about
    limits: Guard = field(default_factory=Guard)  # of a collapse
    stand_ins: dict[str, dict[str, str]] = field(default_factory=dict)  # fleet -> pool -> published pool for its price
    runs: str = "runs/claims"  # folders, relative to the repository
    data: str = "examples/claims/data"
    docs: str = "docs"


@dataclass(frozen=True)
class Cell:
    arm: str
    fleet: str
    seed: int
    regime: str = ""

    @property
    def name(self) -> str:
        regime = f"-{self.regime}" if self.regime else ""
        return f"{self.arm}-{self.fleet}{regime}-s{self.seed}"


def load_study(name: str, *, folder: Path = STUDIES) -> Study:
    """Raises ConfigError, one line, for a study that does not exist or has unknown keys."""
    path = folder / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        raise ConfigError(f"study={name}: no such study; use one of {known}")
    try:
        values = OmegaConf.merge(OmegaConf.structured(Study), {"name": name}, OmegaConf.load(path))
        study = OmegaConf.to_object(values)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    assert isinstance(study, Study)
    return study


def cells(study: Study) -> list[Cell]:
    """Seeds outermost, so that an unfinished study has whole rows."""
    return [
        Cell(arm, fleet, seed, regime)
        for seed in study.seeds
        for regime in study.regimes
        for arm in study.arms
        for fleet in study.fleets
    ]


def overrides(study: Study, cell: Cell) -> list[str]:
    """The quickstart's overrides of a cell, but for its run folder."""
    return [
        f"algo={cell.arm}",
        f"fleet={study.fleets[cell.fleet]}",
        f"seed={cell.seed}",
        f"updates={study.updates}",
        "guard.action=warn",
        *study.regimes[cell.regime],
    ]


def run_dir(study: Study, cell: Cell) -> Path:
    """Relative to the repository, as `study.runs` is."""
    return Path(study.runs, study.name, cell.name)


def command(study: Study, cell: Cell) -> list[str]:
    """The one command that runs a cell, from the repository's root."""
    script = (QUICKSTART / "run.sh").relative_to(ROOT)
    return ["bash", str(script), *overrides(study, cell), f"run_dir={run_dir(study, cell)}", f"run_id={cell.name}"]


def command_line(study: Study, cell: Cell) -> str:
    return shlex.join(command(study, cell))


def config_of(study: Study, cell: Cell) -> Config:
    """The quickstart's configuration of a cell."""
    return load(
        "quickstart", [*overrides(study, cell), f"run_dir={run_dir(study, cell)}"], conf_dir=QUICKSTART / "conf"
    )


def choose(
    study: Study,
    arms: Sequence[str] = (),
    fleets: Sequence[str] = (),
    seeds: Sequence[int] = (),
    regimes: Sequence[str] = (),
) -> list[Cell]:
    """The cells of a study that match; an empty choice means all."""
    return [
        cell
        for cell in cells(study)
        if (not arms or cell.arm in arms)
        and (not fleets or cell.fleet in fleets)
        and (not seeds or cell.seed in seeds)
        and (not regimes or cell.regime in regimes)
    ]
