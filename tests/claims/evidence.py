"""Synthetic evidence: what runs of a study would say if its arms behaved as asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from claims.judge import Evidence
from claims.readings import Reading, read
from claims.results import Result
from claims.study import Cell, Study, cells, load_study
from traces import ramp, run, wobble

from miles_mixprec.guard.signals import EvalLine, Mean, Signals

UPDATES = 100
KL = {"mixed": 5e-3, "homogeneous": 1e-3}
Run = Callable[[Cell], list[Signals]]


def collapses_at(update: int, *, lead: int = 6) -> Run:
    """All three signs at `update`, the tail ratio `lead` updates before."""

    def trace(cell: Cell) -> list[Signals]:
        at = update + 2 * cell.seed
        signals = run(
            UPDATES,
            reward=lambda n: 0.4 if n < at else 0.02,
            kl=ramp(KL[cell.fleet], 20 * KL[cell.fleet], at, at + 1),
            format_errors=lambda n: 0.02 if n <= at else 0.9,
            tail_ratio=lambda n: 1.1 if n < at - lead else 30.0,
        )
        return _arm(cell, signals)

    return trace


def stable(cell: Cell) -> list[Signals]:
    signals = run(UPDATES, reward=ramp(0.3, 0.6, 0, 60), kl=wobble(lambda n: KL[cell.fleet], 0.1))
    return _arm(cell, signals)


def _arm(cell: Cell, signals: list[Signals]) -> list[Signals]:
    """Arms record a tail only with score centering on a head."""
    kept = [s if cell.arm in ("sc", "sc_mis") else replace(s, tail_ratio=Mean()) for s in signals]
    return [replace(s, entropy=Mean(1.0 + 0.02 * cell.seed, 1)) for s in kept]


AS_PUBLISHED: dict[tuple[str, str], Run] = {
    ("grpo", "mixed"): collapses_at(25),
    ("grpo", "homogeneous"): collapses_at(60),
    ("mis", "mixed"): collapses_at(80),
    ("sc", "mixed"): collapses_at(33),
    ("grpo_top_p", "mixed"): collapses_at(45),
}


@cache
def _signals(run: Run, cell: Cell) -> list[Signals]:
    return run(cell)


def evidence(
    behaviour: Mapping[tuple[str, str], Run] = AS_PUBLISHED, *, pass_4: Mapping[str, float] | None = None
) -> Evidence:
    """`behaviour` by arm and fleet; cells that it does not name are stable."""
    study: Study = replace(load_study("claims"), updates=UPDATES)
    ends = {"mixed": 0.8, "homogeneous": 0.8} | dict(pass_4 or {})
    results = []
    for cell in cells(study):
        signals = _signals(behaviour.get((cell.arm, cell.fleet), stable), cell)
        evals = [EvalLine(update=-1, time=0.0, pass_1=0.3, pass_4=0.5)]
        end = ends[cell.fleet]
        evals += [EvalLine(update=n, time=0.0, pass_1=end - 0.2, pass_4=end) for n in range(9, UPDATES, 10)]
        results.append(Result(cell, signals, evals))
    return Evidence(study, results, [_read(result, study) for result in results])


_readings: dict[tuple[int, Cell, float], Reading] = {}


def _read(result: Result, study: Study) -> Reading:
    """Each trace once: most evidence differs in one arm only."""
    key = (id(result.signals), result.cell, result.evals[-1].pass_4)
    if key not in _readings:
        _readings[key] = read(result, study.limits)
    return _readings[key]
