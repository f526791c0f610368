"""Collapse detection against the run's own start.

Runs on mixed precisions live with a sampler-trainer KL several times that of homogeneous ones and stay healthy, so no
level of KL is an alarm: growth over the run's first updates is. Two ways of collapsing are known from published runs:

* **three signs**: reward falls, KL grows threefold or more, most episodes end on repeated format errors. The tail
  ratio runs away five to ten updates earlier, the gradient norm shortly before.
* **length**: turns run to their maximum length, with few format errors.

A sign stands once it has been there for `patience` updates in a row. One that stands alone is a warning, and so are
the early ones; two of the three, or maximum length with a fallen reward or a grown KL, are a collapse.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from statistics import fmean, median

from miles_mixprec.config import Guard as Thresholds
from miles_mixprec.guard.signals import Signals

THREE_SIGNS = "three signs"
LENGTH = "length"

_MEANING = {
    "kl": "sampler-trainer KL",
    "tail_ratio": "tail ratio",
    "grad_norm": "gradient norm",
    "format_errors": "share of episodes that end on format errors",
    "length": "share of samples at maximum length",
    "reward": "fall of the reward from its peak, as a share",
}


class Level(IntEnum):
    BASELINE = 0  # the first updates, that later ones are compared to
    HEALTHY = 1
    WARNING = 2
    COLLAPSE = 3


@dataclass(frozen=True)
class Verdict:
    update: int
    level: Level
    mode: str | None = None  # how it collapsed
    signs: tuple[str, ...] = ()  # that stand: kl, tail_ratio, grad_norm, format_errors, length, reward, "pool NAME"
    reasons: tuple[str, ...] = ()  # the same in words and figures
    pools_to_quarantine: tuple[str, ...] = ()  # pools whose own KL grew beyond the others'


class Guard:
    """Feed it every update in order. Equal logs give equal verdicts, so a restarted process replays the log."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self._start: list[Signals] = []
        self._limits: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=thresholds.patience)
        self._peak = 0.0  # of the reward's moving mean over `patience` updates
        self._streaks: Counter[str] = Counter()

    def update(self, now: Signals) -> Verdict:
        if now.reward.value is not None:
            self._rewards.append(now.reward.value)
            if len(self._rewards) == self.thresholds.patience:
                self._peak = max(self._peak, fmean(self._rewards))
        if len(self._start) < self.thresholds.baseline_updates:
            self._start.append(now)
            self._limits = _limits(self._start, self.thresholds)
            return Verdict(now.update, Level.BASELINE)

        readings = {name: (value, self._limits.get(name)) for name, value in self._readings(now).items()}
        standing = {
            sign: f"{_MEANING.get(sign, f'KL of {sign}')}: {value:.3g}, limit {limit:.3g}"
            for sign, (value, limit) in (readings | self._pool_kl(now)).items()
            if value is not None and limit is not None and self._stands(sign, value, limit)
        }
        mode = _mode(standing.keys())
        return Verdict(
            update=now.update,
            level=Level.COLLAPSE if mode else Level.WARNING if standing else Level.HEALTHY,
            mode=mode,
            signs=tuple(standing),
            reasons=tuple(standing.values()),
            pools_to_quarantine=tuple(sign.removeprefix("pool ") for sign in standing if sign not in _MEANING),
        )

    def _stands(self, sign: str, value: float, limit: float) -> bool:
        """The sign was there `patience` times in a row; updates that do not tell are not asked."""
        self._streaks[sign] = 0 if value <= limit else self._streaks[sign] + 1  # nan is above any limit
        return self._streaks[sign] >= self.thresholds.patience

    def _readings(self, now: Signals) -> dict[str, float | None]:
        reward = now.reward.value
        return {
            "kl": now.kl.value,
            "tail_ratio": now.tail_ratio.value,
            "grad_norm": now.grad_norm,
            "format_errors": now.format_errors.value,
            "length": now.length_capped.value,
            "reward": 1 - reward / self._peak if reward is not None and self._peak > 0 else None,
        }

    def _pool_kl(self, now: Signals) -> dict[str, tuple[float, float]]:
        """Each pool's KL and its limit: `kl_growth` times its own start, or the run's, or that by which others grew.

        A collapsing run raises every pool's KL; a faulty pool raises its own. The run's start counts because a BF16
        pool starts at rounding error, which staleness alone multiplies by a thousand.
        """
        starts = {
            name: start
            for name in now.pools
            if (start := _typical(s.pools[name].kl.value for s in self._start if name in s.pools))
        }
        kl = {name: value for name in starts if (value := now.pools[name].kl.value) is not None}
        grown = {name: value / starts[name] for name, value in kl.items()}
        others = {name: [g for other, g in grown.items() if other != name] for name in grown}
        own = {name: self.thresholds.kl_growth * starts[name] * max(1.0, median(others[name] or [1.0])) for name in kl}
        return {
            f"pool {name}": (value, max(self._limits.get("kl", 0.0), own[name]))
            for name, value in kl.items()
            if others[name]
        }


def _limits(start: Sequence[Signals], thresholds: Thresholds) -> dict[str, float]:
    """The limit of each sign, from the run's first updates. A sign that they say nothing of has none."""
    found = {"reward": thresholds.reward_fall}
    if kl := _typical(s.kl.value for s in start):
        found["kl"] = thresholds.kl_growth * kl
    if grad_norm := _typical(s.grad_norm for s in start):
        found["grad_norm"] = thresholds.grad_norm_growth * grad_norm
    if tail_ratio := _typical(s.tail_ratio.value for s in start):
        found["tail_ratio"] = thresholds.tail_ratio * max(1.0, tail_ratio)
    # A share's limit: so many of the episodes that were fine at the start no longer are.
    if (errors := _typical(s.format_errors.value for s in start)) is not None:
        found["format_errors"] = errors + thresholds.format_error_share * (1 - errors)
    if (capped := _typical(s.length_capped.value for s in start)) is not None:
        found["length"] = capped + thresholds.length_cap_share * (1 - capped)
    return found


def judge(thresholds: Thresholds, run: Iterable[Signals]) -> list[Verdict]:
    """One verdict per update of a logged run."""
    guard = Guard(thresholds)
    return [guard.update(now) for now in run]


def _typical(values: Iterable[float | None]) -> float | None:
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return median(finite) if finite else None


def _mode(standing: Set[str]) -> str | None:
    if "length" in standing and standing & {"reward", "kl"}:
        return LENGTH
    return THREE_SIGNS if len(standing & {"reward", "kl", "format_errors"}) >= 2 else None
