"""What one run comes to: the figures that the claims are judged by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from claims.results import Result
from claims.study import Cell
from miles_mixprec.config import Guard
from miles_mixprec.guard.collapse import Level, judge
from miles_mixprec.guard.signals import Mean, Signals, total


@dataclass(frozen=True)
class Reading:
    """Start is the guard's baseline, end the last tenth of the updates (at least as many as the baseline)."""

    cell: Cell
    updates: int
    collapse: int | None  # update at which the run was called collapsed
    recovered: bool  # ... and yet it ended without that verdict, at or above its starting reward
    mode: str | None
    signs: dict[str, int]  # first update at which each sign stood
    reward: tuple[float, float]  # start, end
    pass_1: tuple[float, float] | None  # of the starting model, mean over the last third of the evaluations
    pass_4: tuple[float, float] | None
    kl: float | None  # nats per token over the whole run
    kl_growth: float | None  # end over start
    kl_by_pool: dict[str, float]
    tail_ratio: float | None  # highest of any update
    masked: float | None
    grad_norm: float | None  # median
    entropy: tuple[float | None, float | None]
    format_errors: tuple[float, float]
    length_capped: float
    response_tokens: tuple[float, float]
    staleness: float | None
    seconds: float  # per update, median


def read(result: Result, limits: Guard) -> Reading:
    run = result.signals
    start = run[: limits.baseline_updates]
    end = run[-max(len(run) // 10, limits.baseline_updates) :]
    verdicts = judge(limits, run)
    collapsed = next((v for v in verdicts if v.level == Level.COLLAPSE), None)
    signs: dict[str, int] = {}
    for verdict in verdicts:
        for sign in verdict.signs:
            signs.setdefault(sign, verdict.update)

    def both(part: Callable[[Signals], Mean]) -> tuple[float | None, float | None]:
        return _mean(start, part), _mean(end, part)

    def known(part: Callable[[Signals], Mean]) -> tuple[float, float]:
        first, last = both(part)
        return first or 0.0, last or 0.0

    kl_start, kl_end = both(lambda s: s.kl)
    pools = sorted({name for s in run for name in s.pools})
    kl_by_pool = {name: total(s.pools[name].kl for s in run if name in s.pools).value for name in pools}
    reward = known(lambda s: s.reward)
    ended = any(v.level == Level.COLLAPSE for v in verdicts[-len(end) :])
    norms = [s.grad_norm for s in run if s.grad_norm is not None and math.isfinite(s.grad_norm)]
    return Reading(
        cell=result.cell,
        updates=len(run),
        collapse=collapsed.update if collapsed else None,
        recovered=collapsed is not None and not ended and reward[1] >= reward[0],
        mode=collapsed.mode if collapsed else None,
        signs=signs,
        reward=reward,
        pass_1=_evals(result, "pass_1"),
        pass_4=_evals(result, "pass_4"),
        kl=_mean(run, lambda s: s.kl),
        kl_growth=kl_end / kl_start if kl_start and kl_end is not None else None,
        kl_by_pool={name: kl for name, kl in kl_by_pool.items() if kl is not None},
        tail_ratio=max((v for s in run if (v := s.tail_ratio.value) is not None), default=None),
        masked=_mean(run, lambda s: s.masked),
        grad_norm=median(norms) if norms else None,
        entropy=both(lambda s: s.entropy),
        format_errors=known(lambda s: s.format_errors),
        length_capped=_mean(end, lambda s: s.length_capped) or 0.0,
        response_tokens=known(lambda s: s.response_tokens),
        staleness=_mean(run, lambda s: s.staleness),
        seconds=median(s.seconds for s in run),
    )


def _mean(run: Sequence[Signals], part: Callable[[Signals], Mean]) -> float | None:
    return total(part(signals) for signals in run).value


def _evals(result: Result, name: str) -> tuple[float, float] | None:
    """Of the starting model, and the mean over the last third of the later evaluations."""
    values = [float(getattr(line, name)) for line in result.evals if line.update >= 0]
    first = next((float(getattr(line, name)) for line in result.evals if line.update < 0), None)
    if first is None or not values:
        return None
    return first, fmean(values[-max(len(values) // 3, 1) :])
