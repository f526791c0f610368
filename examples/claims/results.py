"""A study's results as data: one compressed JSON-lines file per finished cell, from which all else is derived."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from claims.study import ROOT, Cell, Study, cells, config_of, overrides, run_dir
from miles_mixprec.config import from_mapping, to_mapping
from miles_mixprec.errors import MixprecError
from miles_mixprec.guard.signals import EvalLine, Line, MetricsLog, Signals, TrainLine, finished

_KEPT = ("kl", "masked", "ratio_tail", "tail_ratio", "sampler_mass", "trainer_mass", "entropy", "rejected")
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class ResultError(MixprecError):
    """Kept data of another study, or a run that is not finished."""


@dataclass(frozen=True)
class Result:
    """A finished cell."""

    cell: Cell
    signals: list[Signals]
    evals: list[EvalLine]
    config: dict[str, Any] = field(default_factory=dict)  # as it ran


def path_of(study: Study, cell: Cell) -> Path:
    return ROOT / study.data / study.name / f"{cell.name}.jsonl.zst"


def keep(study: Study, cell: Cell) -> Path:
    """Keep what the cell's run logged: all of it but the loss metrics that no reading uses, to six digits.

    Raises ResultError if the run has not finished its updates.
    """
    lines = MetricsLog(ROOT / run_dir(study, cell)).read()
    done = len(finished(lines))
    if done < study.updates:
        raise ResultError(f"{cell.name}: {done} of {study.updates} updates; run the study again to go on")
    config = to_mapping(config_of(study, cell))
    head = {"kind": "cell", **asdict(cell), "overrides": overrides(study, cell), "config": config}
    rows = [json.dumps(head).encode(), *(msgspec.json.encode(_slim(line)) for line in lines)]
    path = path_of(study, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_bytes(zstandard.compress(b"\n".join(rows) + b"\n", 19))
    partial.replace(path)
    return path


def load_results(study: Study) -> list[Result]:
    """The cells that are kept.

    Raises ResultError for one that ran with other overrides than the study's now, or with another configuration than
    its neighbours of the same fleet and regime.
    """
    results: list[Result] = []
    shared: dict[tuple[str, str], tuple[str, Cell]] = {}
    for cell in cells(study):
        path = path_of(study, cell)
        if path.exists():
            head, *rows = zstandard.decompress(path.read_bytes()).splitlines()
            made = json.loads(head)
            if made["overrides"] != overrides(study, cell):
                raise ResultError(
                    f"{path}: the study has changed since this cell ran; remove the file to run it again"
                )
            same = _shared(to_mapping(from_mapping(made["config"])))  # options that came later at their defaults
            expected, other = shared.setdefault((cell.fleet, cell.regime), (same, cell))
            if same != expected:
                raise ResultError(
                    f"{path}: ran with another configuration than {other.name}; remove one to run it again"
                )
            lines = [_decoder.decode(row) for row in rows]
            evals = [line for line in lines if isinstance(line, EvalLine)]
            results.append(Result(cell, finished(lines), evals, made["config"]))
    return results


def missing(study: Study, chosen: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in chosen if not path_of(study, cell).exists()]


def _shared(config: Mapping[str, Any]) -> str:
    """What cells of one fleet and regime have in common: all but algorithm, seed and the run's own paths."""
    text = json.dumps(
        {key: value for key, value in config.items() if key not in ("algo", "seed", "run_id")}, sort_keys=True
    )
    return text.replace(str(config["run_dir"]), "")


def _slim(line: Line) -> Line:
    if not isinstance(line, TrainLine):
        return line
    metrics = {
        key: value if value is None else float(f"{value:.6g}")
        for key, value in line.metrics.items()
        if key.rpartition("/")[2].rpartition("_")[0] in _KEPT
    }
    return msgspec.structs.replace(line, metrics=metrics)
