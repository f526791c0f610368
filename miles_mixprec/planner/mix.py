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
    max_engines: int | None = None

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
        bounds=Bounds(0, program.most),
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
    """Shadow prices at the optimum of the relaxed program."""
    program = _Program(offers, demand, limits)
    relaxed = program.relaxed()
    if relaxed.x is None:
        raise ConfigError(program.shortfall())
    duals = dict(zip(program.rows, relaxed.ineqlin.marginals, strict=True))
    return Marginals(
        session=-duals.get("sessions", 0.0),
        reduced={o.name: float(r) for o, r in zip(offers, relaxed.lower.marginals, strict=True)},
        accelerator={name: -duals[f"available {name}"] for name in limits.available if f"available {name}" in duals},
    )


class _Program:
    """Rows of `matrix @ n <= upper`, each with a name."""

    def __init__(self, offers: Sequence[Offer], demand: Demand, limits: Limits) -> None:
        if not offers:
            raise ConfigError("no offers to plan with; name a fleet whose pools are the candidates")
        if demand.sessions <= 0 and demand.turns_per_hour <= 0:
            raise ConfigError("no demand; state sessions, or updates per hour and turns per update")
        self.offers, self.demand, self.limits = offers, demand, limits
        self.capacity = [offer.at(demand.context) for offer in offers]
        self.prices = np.array([offer.price for offer in offers])
        self.most = np.array([np.inf if o.max_engines is None else o.max_engines for o in offers])
        self.slots = np.array([float(anchor.slots) for anchor in self.capacity])
        self.rows: list[str] = []
        self._rows: list[np.ndarray] = []
        self._upper: list[float] = []
        self._build()
        self.matrix, self.upper = np.array(self._rows), np.array(self._upper)

    def _add(self, name: str, row: np.ndarray, upper: float) -> None:
        self.rows.append(name)
        self._rows.append(row)
        self._upper.append(upper)

    def _build(self) -> None:
        if self.demand.sessions > 0:
            self._add("sessions", -self.slots, -self.demand.sessions)
        if self.demand.turns_per_hour > 0:
            rates = [self._required(o.name, a.turns_per_hour, "a turn rate") for o, a in self._pairs()]
            self._add("turns", -np.array(rates), -self.demand.turns_per_hour)
        for name, count in self.limits.available.items():
            widths = [float(o.accelerators_per_engine if o.accelerator == name else 0) for o in self.offers]
            self._add(f"available {name}", np.array(widths), count)
        for i, offer in enumerate(self.offers):
            if offer.max_share < 1:
                row = -offer.max_share * self.slots
                row[i] += self.slots[i]
                self._add(f"share {offer.name}", row, 0.0)
        if self.limits.max_kl is not None:
            kls = np.array([self._required(o.name, o.kl, "a measured KL") for o in self.offers])
            self._add("kl", (kls - self.limits.max_kl) * self.slots, 0.0)

    def _pairs(self) -> list[tuple[Offer, Anchor]]:
        return list(zip(self.offers, self.capacity, strict=True))

    @staticmethod
    def _required(name: str, value: float | None, what: str) -> float:
        if value is None:
            raise ConfigError(
                f"offer {name}: has no {what[2:]}, which this plan needs; give {what} for it or leave it out"
            )
        return value

    def relaxed(self):  # type: ignore[no-untyped-def]  # scipy's OptimizeResult
        bounds = [(0, None if np.isinf(most) else most) for most in self.most]
        return linprog(self.prices, A_ub=self.matrix, b_ub=self.upper, bounds=bounds, method="highs")

    def shortfall(self) -> str:
        """Why nothing carries the demand: the most that the limits allow, or the limit that excludes everything."""
        keep = [i for i, row in enumerate(self.rows) if row not in ("sessions", "turns")]
        demand_row = self.rows.index("sessions" if "sessions" in self.rows else "turns")
        best = milp(
            self._rows[demand_row],
            constraints=[LinearConstraint(self.matrix[keep], ub=self.upper[keep])] if keep else [],
            bounds=Bounds(0, np.minimum(self.most, 1e6)),
            integrality=np.ones(len(self.offers)),
        )
        names = [self.rows[i] for i in keep] or ["engines per offer"]
        limits = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        return (
            f"no mix carries {-self.upper[demand_row]:,.0f} {self.rows[demand_row]}: the limits ({limits}) allow "
            f"{-best.fun:,.0f}; relax one or lower the demand"
        )
