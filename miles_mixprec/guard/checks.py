"""What a mixed-precision run must show about itself, judged from its log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from miles_mixprec.config import Config
from miles_mixprec.guard.collapse import Level, Verdict
from miles_mixprec.guard.signals import PoolSignals, Signals, total

SHARE_ERROR = 0.05  # of all samples; a pool's own relative error is larger where its share is small
MASS_ERROR = 1e-3


@dataclass(frozen=True)
class Check:
    """`passed` is None where the run cannot tell."""

    name: str
    passed: bool | None
    figure: str


def checks(config: Config, run: Sequence[Signals], verdicts: Sequence[Verdict]) -> list[Check]:
    """Every check, in the order of the report."""
    return [
        _shares(config, run),
        _attribution(config, run),
        _kl_order(config, run),
        _support(config, run),
        _versions(config, run),
        _reward(run),
        _contracts(run),
        _collapse(verdicts),
    ]


def declared_share(config: Config, pool: str) -> float:
    """A pool's part of the fleet's slots."""
    return config.fleet.pools[pool].slots / config.fleet.slots


def of_pool(run: Iterable[Signals], pool: str) -> list[PoolSignals]:
    """One pool's signals, over the updates it had samples in."""
    return [signals.pools[pool] for signals in run if pool in signals.pools]


def sampled_share(run: Sequence[Signals], pool: str) -> float:
    """The pool's part of all samples of the run."""
    return sum(p.share.num for p in of_pool(run, pool)) / (sum(s.reward.den for s in run) or 1)


def run_kl(run: Sequence[Signals], pools: Iterable[str]) -> float | None:
    """Sampler-trainer KL over all tokens that `pools` sampled, nats per token."""
    return total(p.kl for pool in pools for p in of_pool(run, pool)).value


def _shares(config: Config, run: Sequence[Signals]) -> Check:
    error = {pool: sampled_share(run, pool) - declared_share(config, pool) for pool in config.fleet.pools}
    worst = max(error, key=lambda pool: abs(error[pool]))
    return Check(
        f"pools sampled in proportion to capacity, within {SHARE_ERROR:.0%} of all samples",
        abs(error[worst]) <= SHARE_ERROR,
        f"largest error {error[worst] * 100:+.1f} points ({worst})",
    )


def _attribution(config: Config, run: Sequence[Signals]) -> Check:
    samples = sum(s.reward.den for s in run)
    attributed = sum(p.share.num for s in run for name, p in s.pools.items() if name in config.fleet.pools)
    return Check(
        "every sample attributed to a pool", attributed == samples, f"{attributed:.0f} of {samples:.0f} samples"
    )


def _kl_order(config: Config, run: Sequence[Signals]) -> Check:
    """At equal and least staleness, because weights that moved on soon outweigh what a format rounds away."""
    name = "sampler-trainer KL of every quantised pool above the BF16 pools', at the least staleness"
    lag = {s.update: s.staleness.value for s in run if s.staleness.value is not None}
    least = min(lag.values(), default=0.0)
    fresh = [s for s in run if s.update in lag and lag[s.update] == least]
    kl = {pool: run_kl(fresh, [pool]) for pool, p in config.fleet.pools.items() if p.view != "bf16"}
    bf16 = run_kl(fresh, (pool for pool, p in config.fleet.pools.items() if p.view == "bf16"))
    known = {pool: value for pool, value in kl.items() if value is not None}
    if bf16 is None or not known:
        return Check(name, None, "needs a BF16 pool and a quantised one")
    figures = ", ".join(f"{pool} {value:.2e}" for pool, value in known.items())
    return Check(name, min(known.values()) > bf16, f"staleness {least:.1f}: BF16 {bf16:.2e}, {figures}")


def _support(config: Config, run: Sequence[Signals]) -> Check:
    """Support, log-probs and renormalisation agree: both sides' probabilities on the support add up to the same."""
    name = f"tail ratio on the recorded support: 1 ± {MASS_ERROR:g}"
    if not config.algo.support:
        return Check(name, None, f"arm {config.algo.name} records no support")
    ratios = [v for s in run if (v := s.mass_ratio.value) is not None]
    if not ratios:
        return Check(name, None, "not logged")
    worst = max(ratios, key=lambda v: abs(v - 1))
    return Check(name, abs(worst - 1) <= MASS_ERROR, f"furthest from 1 in any update: {worst:.6f}")


def _versions(config: Config, run: Sequence[Signals]) -> Check:
    name = "weight versions advance in every pool"
    newest = {pool: [p.versions[1] for p in of_pool(run, pool)] for pool in config.fleet.pools}
    if len(run) < 2:
        return Check(name, None, "needs two updates")
    return Check(
        name,
        all(v and v[0] < v[-1] for v in newest.values()),
        ", ".join(f"{pool} {v[0]} to {v[-1]}" if v else f"{pool} no samples" for pool, v in newest.items()),
    )


def _reward(run: Sequence[Signals]) -> Check:
    name = "reward rises, first quarter to last"
    quarter = len(run) // 4
    if not quarter:
        return Check(name, None, "needs four updates")
    first, last = (total(s.reward for s in part).value or 0.0 for part in (run[:quarter], run[-quarter:]))
    return Check(name, last > first, f"{first:.3f} to {last:.3f}")


def _contracts(run: Sequence[Signals]) -> Check:
    rejected = total(s.rejected for s in run).value
    text = "not logged" if rejected is None else f"{rejected:.2%} of the samples rejected"
    return Check("every sample keeps its contracts", None if rejected is None else rejected == 0, text)


def _collapse(verdicts: Sequence[Verdict]) -> Check:
    worst = max(verdicts, key=lambda v: v.level, default=None)
    if worst is None or worst.level == Level.BASELINE:
        return Check("no collapse", None, "too few updates to tell")
    text = "no sign" if worst.level == Level.HEALTHY else f"update {worst.update}: {'; '.join(worst.reasons)}"
    return Check("no collapse", worst.level < Level.COLLAPSE, text)
