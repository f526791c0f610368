"""The cheapest integer mix of engines that carries a demand, as a mixed-integer linear program.

    minimise    sum_i price_i n_i
    subject to  sum_i slots_i n_i            >= sessions
                sum_i turns_i n_i            >= updates/hour * turns/update
                sum_{i on a} width_i n_i     <= available_a              for every accelerator a
                slots_i n_i                  <= cap_i sum_j slots_j n_j  for every offer i with a cap
                sum_i (kl_i - kl) slots_i n_i <= 0                       if the mean KL is bounded
                n_i integer, >= 0

The capacity of an offer is what a benchmark found at the latency bound, so latency needs no constraint of its own.
Sessions are shared out in proportion to slots, as the router does. Solved by HiGHS (`scipy.optimize.milp`).

    >>> h200 = Offer("h200", "h200", 1, 4.54, (Anchor(64_000, 32),))
    >>> b300 = Offer("b300", "b300", 1, 7.10, (Anchor(64_000, 48),))
    >>> solve([h200, b300], Demand(100, context=64_000)).engines  # 2 x 4.54 + 7.10 < 4 x 4.54
    {'h200': 2, 'b300': 1}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from miles_mixprec.errors import ConfigError


@dataclass(frozen=True)
class Anchor:
    """One engine at the latency bound with sessions of `context` tokens, as measured."""

    context: int
    slots: int
    turns_per_hour: float | None = None


@dataclass(frozen=True)
class Offer:
    """A kind of engine that can be had, e.g. one pool of a fleet. `price` is $ per engine-hour, all included."""

    name: str
    accelerator: str
    accelerators_per_engine: int
    price: float
    anchors: tuple[Anchor, ...]  # by rising context
    kl: float | None = None  # sampler-trainer KL per token, measured
    max_share: float = 1.0  # of the slots

    def at(self, context: int) -> Anchor:
        """Capacity at `context`: linear between anchors, inversely proportional to the context beyond the last.

        Below the first anchor its own figures hold; nothing is assumed to get better unmeasured.
        """
        contexts = [anchor.context for anchor in self.anchors]
        shrink = min(1.0, contexts[-1] / context)
        slots = np.interp(context, contexts, [anchor.slots for anchor in self.anchors]) * shrink
        rates = [anchor.turns_per_hour for anchor in self.anchors]
        known = [rate for rate in rates if rate is not None]
        turns = float(np.interp(context, contexts, known) * shrink) if len(known) == len(rates) else None
        return Anchor(context, int(slots + 1e-9), turns)


@dataclass(frozen=True)
class Demand:
    """Concurrent sessions, or a rate of updates, or both, of sessions that hold `context` tokens."""

    sessions: int = 0
    updates_per_hour: float = 0.0
    turns_per_update: float = 0.0
    context: int = 1

    @property
    def turns_per_hour(self) -> float:
        return self.updates_per_hour * self.turns_per_update


@dataclass(frozen=True)
class Limits:
    available: Mapping[str, int] = field(default_factory=dict)  # accelerators by name; a name left out is unlimited
    max_kl: float | None = None  # on the mean over sessions


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Mix:
    """A solved mix. `lp_bound` is the $ per hour that no mix, integer or not, can go below."""

    engines: dict[str, int]  # offers with at least one engine, in the order given
    slots: int
    turns_per_hour: float | None
    hourly: float
    lp_bound: float


@dataclass(frozen=True)
class Marginals:
    """Duals of the relaxed program: what the next unit would cost or save, $ per hour."""

    session: float
    reduced: dict[str, float]  # how much cheaper an unused offer's engine would have to be
    accelerator: dict[str, float]  # what one more accelerator would save


def solve(offers: Sequence[Offer], demand: Demand, limits: Limits = NO_LIMITS) -> Mix:
    """The cheapest mix. Raises ConfigError when no mix carries the demand, or figures that it needs are missing."""
    program = _Program(offers, demand, limits)
    result = milp(
        program.prices,
        constraints=[LinearConstraint(program.matrix, ub=program.upper)],
        integrality=np.ones(len(offers)),
        options={"mip_rel_gap": 1e-4, "time_limit": 30.0},
    )
    if result.x is None:
        raise ConfigError(program.shortfall())
    counts = [round(x) for x in result.x]
    rates = [anchor.turns_per_hour for anchor in program.capacity]
    return Mix(
        engines={offer.name: n for offer, n in zip(offers, counts, strict=True) if n},
        slots=sum(n * anchor.slots for n, anchor in zip(counts, program.capacity, strict=True)),
        turns_per_hour=None if None in rates else sum(n * r for n, r in zip(counts, rates, strict=True) if r),
        hourly=float(program.prices @ counts),
        lp_bound=program.relaxed().fun,
    )


def marginals(offers: Sequence[Offer], demand: Demand, limits: Limits = NO_LIMITS) -> Marginals:
    """Shadow prices at the optimum of the relaxed program, for a demand that `solve` can carry."""
    program = _Program(offers, demand, limits)
    relaxed = program.relaxed()
    duals = dict(zip(program.rows, relaxed.ineqlin.marginals, strict=True))
    return Marginals(
        session=-duals.get("sessions", 0.0),
        reduced={o.name: float(r) for o, r in zip(offers, relaxed.lower.marginals, strict=True)},
        accelerator={name: -duals[f"available {name}"] for name in limits.available},
    )


class _Program:
    """Rows of `matrix @ n <= upper`, each with a name, for engine counts n >= 0."""

    def __init__(self, offers: Sequence[Offer], demand: Demand, limits: Limits) -> None:
        if not offers:
            raise ConfigError("no offers to plan with; name a fleet whose pools are the candidates")
        if demand.sessions <= 0 and demand.turns_per_hour <= 0:
            raise ConfigError("no demand; state sessions, or updates per hour and turns per update")
        self.capacity = [offer.at(demand.context) for offer in offers]
        self.prices = np.array([offer.price for offer in offers])
        slots = np.array([float(anchor.slots) for anchor in self.capacity])
        rows: dict[str, tuple[np.ndarray, float]] = {}
        if demand.sessions > 0:
            rows["sessions"] = -slots, -demand.sessions
        if demand.turns_per_hour > 0:
            rates = _known("turn rate", {o.name: a.turns_per_hour for o, a in zip(offers, self.capacity, strict=True)})
            rows["turns"] = -rates, -demand.turns_per_hour
        for name, count in limits.available.items():
            widths = [float(o.accelerators_per_engine if o.accelerator == name else 0) for o in offers]
            rows[f"available {name}"] = np.array(widths), count
        for i, offer in enumerate(offers):
            if offer.max_share < 1:
                row = -offer.max_share * slots
                row[i] += slots[i]
                rows[f"share {offer.name}"] = row, 0.0
        if limits.max_kl is not None:
            rows["kl"] = (_known("measured KL", {o.name: o.kl for o in offers}) - limits.max_kl) * slots, 0.0
        self.rows = list(rows)
        self.matrix = np.array([row for row, _ in rows.values()])
        self.upper = np.array([upper for _, upper in rows.values()])

    def relaxed(self):  # type: ignore[no-untyped-def]  # scipy's OptimizeResult
        return linprog(self.prices, A_ub=self.matrix, b_ub=self.upper, method="highs")

    def shortfall(self) -> str:
        """Why nothing carries the demand: the most that the limits allow of it."""
        demands = [i for i, row in enumerate(self.rows) if row in ("sessions", "turns")]
        others = [i for i in range(len(self.rows)) if i not in demands]
        most = [
            milp(
                self.matrix[i],
                constraints=[LinearConstraint(self.matrix[others], ub=self.upper[others])] if others else [],
                bounds=Bounds(0, 1e6),
                integrality=np.ones(len(self.prices)),
            )
            for i in demands
        ]
        asked = " and ".join(f"{-self.upper[i]:,.0f} {self.rows[i]}" for i in demands)
        allowed = " and ".join(f"{abs(best.fun):,.0f}" for best in most)
        names = [self.rows[i] for i in others] or ["what an engine holds"]
        limits = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        return f"no mix carries {asked}: the limits ({limits}) allow {allowed}; relax one or lower the demand"


def _known(what: str, values: Mapping[str, float | None]) -> np.ndarray:
    """`values` by offer as an array. Raises ConfigError for an offer without one."""
    for name, value in values.items():
        if value is None:
            raise ConfigError(
                f"offer {name}: has no {what}, which this plan needs; give a {what} for it or leave it out"
            )
    return np.array(list(values.values()), dtype=float)
