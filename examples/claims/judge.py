"""The article's claims, one function each: readings in, a judgement out.

A claim holds or does not, holds in part where seeds disagree, and cannot be judged where this scale does not show what
it is about. The rules below were written before any result and apply to whatever comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from claims.readings import Reading
from claims.results import Result
from claims.study import Study
from miles_mixprec.config import load
from miles_mixprec.fleet.accelerators import hourly_price
from miles_mixprec.guard.signals import Signals

HOLDS, PARTLY, FAILS, OPEN = "holds", "holds in part", "does not hold", "cannot be judged"

HORIZON = 2.0  # a run that outlives plain GRPO's collapse by this factor is taken not to collapse
PARITY = 0.05  # difference of pass@k within which two fleets are level
LARGER = 2.0  # factor by which the mixed KL must exceed the homogeneous one for parity to mean anything
CLOSE = 0.2  # mean relative difference of two curves that "stay close"
SIGNS = ("reward", "kl", "format_errors")


@dataclass(frozen=True)
class Judgement:
    number: str
    claim: str
    article: str  # its figure
    ours: str  # with the spread over seeds
    verdict: str
    why: str


@dataclass(frozen=True)
class Evidence:
    """The study's finished cells, read."""

    study: Study
    results: Sequence[Result]
    readings: Sequence[Reading]

    def of(self, arm: str, *fleets: str) -> list[Reading]:
        return [r for r in self.readings if r.cell.arm == arm and r.cell.fleet in fleets]

    def runs(self, arm: str, fleet: str) -> list[list[Signals]]:
        return [r.signals for r in self.results if r.cell.arm == arm and r.cell.fleet == fleet]


def judge_all(evidence: Evidence) -> list[Judgement]:
    return [
        grpo_collapses(evidence),
        grpo_lasts_longer_on_one_precision(evidence),
        *(delays_only(evidence, arm) for arm in ("mis", "sc", "grpo_top_p")),
        *(is_stable(evidence, arm) for arm in ("sc_mis", "sc_mis_top_p")),
        parity(evidence),
        three_signs(evidence),
        tail_ratio_first(evidence),
        *(stays_close(evidence, *curve) for curve in CLOSE_CURVES),
        cost(evidence),
    ]


# --- collapse ------------------------------------------------------------------------------------------------------


def grpo_collapses(evidence: Evidence) -> Judgement:
    runs = evidence.of("grpo", "mixed")
    verdict, why = _of_seeds([r.collapse is not None for r in runs], "collapsed")
    return Judgement(
        "1a",
        "Plain GRPO collapses on mixed samplers.",
        "by step 40: 62% of episodes end on format errors",
        _onsets(runs),
        verdict,
        why,
    )


def grpo_lasts_longer_on_one_precision(evidence: Evidence) -> Judgement:
    mixed, single = evidence.of("grpo", "mixed"), evidence.of("grpo", "homogeneous")
    ours = f"mixed {_onsets(mixed)}; homogeneous {_onsets(single)}"
    if not mixed or not single:
        verdict, why = OPEN, "no runs"
    elif all(r.collapse is None for r in mixed):
        verdict, why = OPEN, "no mixed run collapsed, so there is nothing to be later than"
    elif median(map(_onset, single)) <= median(map(_onset, mixed)):
        verdict, why = FAILS, "the homogeneous runs collapsed no later"
    elif all(r.collapse is not None for r in single):
        verdict, why = HOLDS, "every homogeneous run collapsed, later than the mixed ones"
    else:
        lasting = sum(r.collapse is None for r in single)
        verdict, why = (
            PARTLY,
            f"later, but {lasting} of {len(single)} did not collapse within {single[0].updates} updates",
        )
    return Judgement(
        "1b",
        "Plain GRPO collapses on homogeneous samplers too, later.",
        "healthy at step 80, collapsed at 120",
        ours,
        verdict,
        why,
    )


_ARTICLE_DELAYS = {
    "mis": "2a GRPO + MIS: healthy to step 120, format errors from 140",
    "sc": "2b SC: tail ratio runs away at step 33, collapse by 49",
    "grpo_top_p": "2c GRPO + top-p: best early, collapse from step 60, in long turns",
}


def delays_only(evidence: Evidence, arm: str) -> Judgement:
    runs, plain = evidence.of(arm, "mixed"), evidence.of("grpo", "mixed")
    number, figure = _ARTICLE_DELAYS[arm].split(" ", 1)
    reference = median(map(_onset, plain)) if plain else math.inf
    collapsed = [r.collapse is not None for r in runs]
    if not runs:
        verdict, why = OPEN, "no runs"
    elif math.isinf(reference):
        verdict, why = OPEN, "plain GRPO did not collapse in most seeds, so there is nothing to delay"
    elif all(collapsed):
        later = median(map(_onset, runs)) > reference
        verdict, why = (HOLDS, "collapsed later") if later else (PARTLY, "collapsed, but no later than plain GRPO")
    elif any(collapsed):
        verdict, why = PARTLY, f"{sum(collapsed)} of {len(runs)} seeds collapsed"
    elif runs[0].updates >= HORIZON * reference:
        verdict = FAILS
        why = f"no collapse within {runs[0].updates} updates, {runs[0].updates / reference:.1f} times plain GRPO's"
    else:
        verdict, why = OPEN, f"no collapse, but the runs end before {HORIZON:g} times plain GRPO's collapse"
    claim = f"One correction alone ({arm}) only delays the collapse."
    return Judgement(number, claim, figure, _onsets(runs), verdict, why)


def is_stable(evidence: Evidence, arm: str) -> Judgement:
    runs, plain = evidence.of(arm, "mixed", "homogeneous"), evidence.of("grpo", "mixed")
    stable = [r.collapse is None and r.reward[1] >= r.reward[0] for r in runs]
    verdict, why = _of_seeds(stable, "stayed stable and ended at or above their starting reward")
    if verdict == HOLDS and not any(r.collapse is not None for r in plain):
        verdict, why = OPEN, "stable, but so was plain GRPO: nothing here had to be survived"
    rewards = (
        f"; reward {_spread([r.reward[0] for r in runs])} to {_spread([r.reward[1] for r in runs])}" if runs else ""
    )
    number, name = ("3b", "SC + MIS with top-p") if arm == "sc_mis_top_p" else ("3a", "SC + MIS")
    figure = "stable to step 200 and more"
    return Judgement(number, f"{name} is stable to the end.", figure, f"{_onsets(runs)}{rewards}", verdict, why)


# --- quality -------------------------------------------------------------------------------------------------------


def parity(evidence: Evidence) -> Judgement:
    mixed, single = (evidence.of("sc_mis_top_p", fleet) for fleet in ("mixed", "homogeneous"))
    ends = [[r.pass_4[1] for r in runs if r.pass_4] for runs in (mixed, single)]
    firsts = [[r.pass_1[1] for r in runs if r.pass_1] for runs in (mixed, single)]
    ratio = _ratio([r.kl for r in mixed], [r.kl for r in single])
    if not all(ends) or not all(firsts) or ratio is None:
        verdict, why, ours = OPEN, "no evaluations of both fleets", "-"
    else:
        gaps = {k: fmean(a) - fmean(b) for k, (a, b) in {"pass@1": firsts, "pass@4": ends}.items()}
        ours = (
            f"pass@1 {_spread(firsts[0])} mixed, {_spread(firsts[1])} homogeneous; "
            f"pass@4 {_spread(ends[0])} and {_spread(ends[1])}; KL {ratio:.1f} times"
        )
        text = ", ".join(f"{k} {gap * 100:+.1f} points" for k, gap in gaps.items())
        if ratio < LARGER:
            verdict, why = OPEN, f"{text}, but the mixed KL is only {ratio:.1f} times the homogeneous one"
        elif min(gaps.values()) >= -PARITY:
            verdict, why = HOLDS, f"{text}; level within {PARITY * 100:.0f} points"
        else:
            verdict, why = FAILS, text
    claim = "Mixed matches homogeneous pass@k under SC + MIS + top-p despite a KL several times larger."
    return Judgement("4", claim, "pass@4 on par; KL 4.7 times", ours, verdict, why)


# --- signs ---------------------------------------------------------------------------------------------------------


def three_signs(evidence: Evidence) -> Judgement:
    collapsed = [r for r in evidence.readings if r.collapse is not None]
    verdict, why = _of_seeds([all(sign in r.signs for sign in SIGNS) for r in collapsed], "collapses showed all three")
    counts = ", ".join(f"{sign.replace('_', ' ')} in {sum(sign in r.signs for r in collapsed)}" for sign in SIGNS)
    modes = ", ".join(
        f"{mode} {sum(r.mode == mode for r in collapsed)}" for mode in sorted({str(r.mode) for r in collapsed})
    )
    ours = f"of {len(collapsed)} collapses: {counts} (mode: {modes})" if collapsed else "no collapse"
    claim = "Reward falls, KL grows 3x or more and most episodes end on format errors in every collapse."
    return Judgement("5a", claim, "every collapse", ours, verdict, why)


def tail_ratio_first(evidence: Evidence) -> Judgement:
    collapsed = [r for r in evidence.readings if r.collapse is not None and r.tail_ratio is not None]
    leads = [
        min((r.signs[s] for s in SIGNS if s in r.signs), default=math.inf) - _first(r, "tail_ratio") for r in collapsed
    ]
    verdict, why = _of_seeds([lead > 0 for lead in leads], "collapses with a recorded tail were led by it")
    known = [lead for lead in leads if math.isfinite(lead)]
    ours = f"{_spread(known, '.0f')} updates before the first of the three" if known else "-"
    if not collapsed:
        why = "no run that records a tail (score centering without top-p) collapsed"
    return Judgement("5b", "The tail ratio moves first.", "5 to 10 steps of warning", ours, verdict, why)


def _entropy(signals: Signals) -> float | None:
    return signals.entropy.value


def _grad_norm(signals: Signals) -> float | None:
    return signals.grad_norm


Value = Callable[[Signals], float | None]
CLOSE_CURVES: tuple[tuple[str, str, str, Value], ...] = (
    ("6a", "entropy", "matches to step 160, then rises on homogeneous", _entropy),
    ("6b", "gradient norm", "similar paths", _grad_norm),
)


def stays_close(evidence: Evidence, number: str, name: str, figure: str, value: Value) -> Judgement:
    """The fleets' mean curves against each other, and one seed against another on the same fleet."""
    mixed, single = (_curves(evidence.runs("sc_mis_top_p", fleet), value) for fleet in ("mixed", "homogeneous"))
    apart = _distance(_mean_curve(mixed), _mean_curve(single))
    if apart is None:
        verdict, why, ours = OPEN, "no runs of both fleets", "-"
    else:
        between = [
            d for curves in (mixed, single) for i, a in enumerate(curves) for b in curves[:i] if (d := _distance(a, b))
        ]
        seeds = fmean(between) if between else 0.0
        ours = f"{apart:.0%} apart on average; seeds of one fleet {seeds:.0%}"
        verdict = HOLDS if apart <= max(CLOSE, seeds) else FAILS
        why = f"limit {CLOSE:.0%}, or what seeds differ by"
    return Judgement(number, f"The {name} of the two fleets stays close.", figure, ours, verdict, why)


# --- cost ----------------------------------------------------------------------------------------------------------


def cost(evidence: Evidence) -> Judgement:
    """Modelled only: where the turns went, at the published $ per slot-hour of the pools that stand in for ours."""
    why = "engines that run dequantized on a CPU have the price and the speed of a CPU; the figure is modelled"
    mixed, single = (_modelled(evidence, fleet) for fleet in ("mixed", "homogeneous"))
    if mixed is None or single is None:
        ours = "-"
    else:
        per_turn, turns = mixed[0] / single[0], mixed[1] / single[1]
        ours = (
            f"modelled {per_turn - 1:+.0%} per turn (${mixed[0]:.3f} and ${single[0]:.3f} per slot-hour), "
            f"{per_turn * turns - 1:+.0%} per update ({mixed[1]:.0f} and {single[1]:.0f} turns)"
        )
    return Judgement(
        "7", "Mixed costs less per update at equal quality.", "about 15% less for most of training", ours, OPEN, why
    )


def _modelled(evidence: Evidence, fleet: str) -> tuple[float, float] | None:
    """($ per slot-hour, averaged over the turns; turns per update) of a fleet; None without turns or stand-ins."""
    runs = evidence.runs("sc_mis_top_p", fleet)
    turns = _turns(runs)
    if not turns or fleet not in evidence.study.stand_ins:
        return None
    dollars = sum(turns[pool] * price for pool, price in slot_prices(evidence.study, fleet).items() if pool in turns)
    return dollars / sum(turns.values()), sum(turns.values()) / sum(map(len, runs))


def slot_prices(study: Study, fleet: str) -> dict[str, float]:
    """$ per slot-hour of each pool's published stand-in, `<fleet configuration>.<pool>`."""
    prices = {}
    for pool, stand_in in study.stand_ins[fleet].items():
        name, _, key = stand_in.partition(".")
        base = ["run_dir=-", "run_id=-", "weights.store=-", "updates=1", "prompts_per_update=1"]
        published = load("config", [f"fleet={name}", *base]).fleet.pools[key]
        prices[pool] = hourly_price(published) / published.slots_per_engine
    return prices


# --- figures -------------------------------------------------------------------------------------------------------


def _of_seeds(hits: Sequence[bool], what: str) -> tuple[str, str]:
    if not hits:
        return OPEN, "no runs"
    verdict = HOLDS if all(hits) else PARTLY if any(hits) else FAILS
    return verdict, f"{sum(hits)} of {len(hits)} {what}"


def _onset(reading: Reading) -> float:
    return math.inf if reading.collapse is None else reading.collapse


def _first(reading: Reading, sign: str) -> float:
    return reading.signs.get(sign, math.inf)


def _onsets(runs: Sequence[Reading]) -> str:
    if not runs:
        return "-"
    at = [r.collapse for r in runs if r.collapse is not None]
    if not at:
        return f"0 of {len(runs)} collapsed in {runs[0].updates} updates"
    recovered = sum(r.recovered for r in runs)
    after = f", {recovered} recovered" if recovered else ""
    return f"{len(at)} of {len(runs)} collapsed, update {_spread(at, '.0f')}{after}"


def _spread(values: Sequence[float], form: str = ".2f") -> str:
    """Mean and range: `0.41 (0.38-0.45)`."""
    if len(values) < 2:
        return format(values[0], form)
    return f"{fmean(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def _ratio(above: Sequence[float | None], below: Sequence[float | None]) -> float | None:
    top, bottom = ([v for v in values if v is not None] for values in (above, below))
    return fmean(top) / fmean(bottom) if top and bottom and fmean(bottom) > 0 else None


def _curves(runs: Sequence[Sequence[Signals]], value: Value) -> list[dict[int, float]]:
    return [{s.update: v for s in run if (v := value(s)) is not None and math.isfinite(v)} for run in runs]


def _mean_curve(curves: Sequence[Mapping[int, float]]) -> dict[int, float]:
    shared = set.intersection(*(set(c) for c in curves)) if curves else set()
    return {update: fmean(c[update] for c in curves) for update in shared}


def _distance(a: Mapping[int, float], b: Mapping[int, float]) -> float | None:
    """Mean over shared updates of |a - b| / mean(a, b)."""
    shared = [u for u in a.keys() & b.keys() if a[u] + b[u] > 0]
    return fmean(2 * abs(a[u] - b[u]) / (a[u] + b[u]) for u in shared) if shared else None


def _turns(runs: Iterable[Sequence[Signals]]) -> dict[str, int]:
    turns: dict[str, int] = {}
    for run in runs:
        for signals in run:
            for name, pool in signals.pools.items():
                turns[name] = turns.get(name, 0) + pool.turns
    return turns
