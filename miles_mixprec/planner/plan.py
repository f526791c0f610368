"""From a fleet's pools and measurements to a planned fleet, with the reasons."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from miles_mixprec.config import Fleet, Modal, Pool
from miles_mixprec.errors import ConfigError
from miles_mixprec.fleet.accelerators import PRICES_AS_OF, hourly_price
from miles_mixprec.planner.cost import INCLUDED, MachinePrices
from miles_mixprec.planner.mix import NO_LIMITS, Anchor, Demand, Limits, Mix, Offer, marginals, solve


@dataclass(frozen=True)
class Stage:
    """The mix from `update` on, and how it differs from the stage before."""

    update: int
    context: int
    mix: Mix
    change: dict[str, int]


def offers_of(
    fleet: Fleet,
    *,
    context: int,
    measured: Mapping[str, Sequence[Anchor]] | None = None,
    kl: Mapping[str, float] | None = None,
    machine: MachinePrices = INCLUDED,
) -> list[Offer]:
    """The pools of `fleet` as offers; `engines` counts for nothing.

    Capacity is what `measured` has for a pool, else `slots_per_engine` at `context` tokens (published, or a prior);
    `kl` is nats per token. Raises ConfigError for measurements or KLs of pools that the fleet lacks.
    """
    measured, kl = measured or {}, kl or {}
    for name in [*measured, *kl]:
        if name not in fleet.pools:
            raise ConfigError(f"pool {name}: measured, but not in fleet {fleet.name}; it has {', '.join(fleet.pools)}")
    return [
        Offer(
            name=name,
            accelerator=pool.accelerator,
            accelerators_per_engine=pool.accelerators_per_engine,
            price=hourly_price(pool) + (pool.cpus or 0) * machine.core + (pool.memory_gib or 0) * machine.gib,
            anchors=tuple(measured.get(name, (Anchor(context, pool.slots_per_engine),))),
            kl=kl.get(name),
            max_share=pool.max_share,
        )
        for name, pool in fleet.pools.items()
    ]


def read_measurements(paths: Sequence[Path], *, latency_s: float) -> dict[str, tuple[Anchor, ...]]:
    """Anchors per pool from result files of `miles-mixprec bench`, at the p90 turn latency `latency_s`."""
    anchors: dict[str, list[Anchor]] = {}
    for path in paths:
        try:
            result = json.loads(path.read_text())
            anchors.setdefault(result["pool"], []).append(anchor_of(result, latency_s))
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{path}: not a result of miles-mixprec bench; measure the pool again") from error
    return {pool: tuple(sorted(found, key=lambda anchor: anchor.context)) for pool, found in anchors.items()}


def anchor_of(result: Mapping[str, Any], latency_s: float) -> Anchor:
    """Slots and turns per hour where p90 first reaches `latency_s`, linear between measured points.

    Raises ConfigError if p90 is above the bound at the first point already.
    """
    points = sorted(result["points"], key=lambda point: point["sessions"])
    within = list(takewhile(lambda point: point["p90_s"] <= latency_s, points))
    if not within:
        first = points[0]
        raise ConfigError(
            f"pool {result['pool']}: p90 turn latency is {first['p90_s']:.1f} s at {first['sessions']} sessions "
            f"already, above the bound of {latency_s:g} s; raise the bound or leave the pool out"
        )
    last = within[-1]
    sessions, turns = float(last["sessions"]), float(last["turns_per_hour"])
    if len(within) < len(points):
        following = points[len(within)]
        part = (latency_s - last["p90_s"]) / (following["p90_s"] - last["p90_s"])
        sessions += part * (following["sessions"] - last["sessions"])
        turns += part * (following["turns_per_hour"] - last["turns_per_hour"])
    return Anchor(int(result["context"]), int(sessions), turns)


def grow(
    offers: Sequence[Offer], demand: Demand, growth: Sequence[tuple[int, int]], limits: Limits = NO_LIMITS
) -> list[Stage]:
    """Plan again at every (update, context): contexts grow in training, and slots shrink with them."""
    stages: list[Stage] = []
    for update, context in growth:
        mix = solve(offers, replace(demand, context=context), limits)
        before = stages[-1].mix.engines if stages else {}
        names = dict.fromkeys([*before, *mix.engines])
        change = {name: mix.engines.get(name, 0) - before.get(name, 0) for name in names}
        stages.append(Stage(update, context, mix, {name: n for name, n in change.items() if n}))
    return stages


def explain(offers: Sequence[Offer], demand: Demand, limits: Limits, mix: Mix) -> list[str]:
    """One line per offer, cheapest per slot first: how many of it and why, then what the limits cost."""
    values = marginals(offers, demand, limits)
    slots = {offer.name: offer.at(demand.context).slots for offer in offers}
    per_slot = {o.name: o.price / slots[o.name] if slots[o.name] else float("inf") for o in offers}
    used: Counter[str] = Counter()
    for offer in offers:
        used[offer.accelerator] += mix.engines.get(offer.name, 0) * offer.accelerators_per_engine

    def why(offer: Offer) -> str:
        count, each = mix.engines.get(offer.name, 0), slots[offer.name]
        limit = limits.available.get(offer.accelerator)
        if each == 0:
            return f"not a single session of {demand.context:,} tokens fits"
        if count and limit is not None and used[offer.accelerator] + offer.accelerators_per_engine > limit:
            return f"all {limit} {offer.accelerator} are used"
        if count and offer.max_share < 1 and (count + 1) * each > offer.max_share * (mix.slots + each):
            return f"at its cap of {offer.max_share:.0%} of the slots"
        if count:
            return "cheapest that is left"
        if values.reduced[offer.name] > 1e-9:
            return f"would have to be ${values.reduced[offer.name]:.2f} per engine-hour cheaper"
        return "no cheaper than what is used"

    return [
        *(
            f"{offer.name}: {mix.engines.get(offer.name, 0)} engines of {slots[offer.name]} slots at "
            f"${per_slot[offer.name]:.3f} per slot-hour; {why(offer)}"
            for offer in sorted(offers, key=lambda offer: per_slot[offer.name])
        ),
        *(
            f"limit on {name}: one more would save ${saving:.2f} per hour"
            for name, saving in values.accelerator.items()
            if saving > 1e-9
        ),
        f"next session: ${values.session:.3f} per hour; no mix costs less than ${mix.lp_bound:.2f} per hour",
    ]


def verdict(offers: Sequence[Offer], demand: Demand, limits: Limits, mix: Mix) -> str:
    """Whether mixing pays against the cheapest fleet of one pool within the limits, and without them."""
    text = "No single pool carries the demand within the limits; only a mix does."
    if (within := _cheapest_single(offers, demand, limits)) is not None:
        name, engines, hourly = within
        if mix.hourly >= hourly * (1 - 1e-9):
            text = f"A mix is not cheaper: {engines} engines of {name} alone cost ${hourly:.2f}/h."
        else:
            saving = 1 - mix.hourly / hourly
            text = f"The mix costs {saving:.1%} less than the cheapest single pool, {name} at ${hourly:.2f}/h."
    if (free := _cheapest_single(offers, demand, replace(limits, available={}))) is not None:
        name, engines, hourly = free
        if hourly < mix.hourly - 1e-9:
            text += (
                f" With enough {name} available, {engines} engines of it alone would cost ${hourly:.2f}/h, "
                f"{1 - hourly / mix.hourly:.1%} less than this mix."
            )
    return text


def _cheapest_single(offers: Sequence[Offer], demand: Demand, limits: Limits) -> tuple[str, int, float] | None:
    """The offer that carries the demand alone for least, without share caps: its name, engines and $ per hour."""
    found = []
    for offer in offers:
        try:
            mix = solve([replace(offer, max_share=1.0)], demand, limits)
        except ConfigError:  # it cannot
            continue
        found.append((offer.name, mix.engines[offer.name], mix.hourly))
    return min(found, key=lambda single: single[2], default=None)


def planned_fleet(fleet: Fleet, mix: Mix, context: int, offers: Sequence[Offer]) -> Fleet:
    """`fleet` with the engines of `mix`, pools without any left out, and slots as planned at `context`."""
    planned = copy.deepcopy(fleet)
    planned.name = "planned"
    planned.pools = {offer.name: planned.pools[offer.name] for offer in offers if offer.name in mix.engines}
    capacity = {offer.name: offer.at(context).slots for offer in offers}
    for name, pool in planned.pools.items():
        pool.engines, pool.slots_per_engine = mix.engines[name], capacity[name]
        pool.max_engines = None
        pool.min_engines = min(pool.min_engines, pool.engines)
    return planned


def fleet_yaml(fleet: Fleet, note: str) -> str:
    """A Hydra fleet file with `note` and the date of the prices on top; values at their defaults are left out."""
    tree = {key: value for key, value in asdict(fleet).items() if key != "modal" or fleet.modal != Modal()}
    blank = asdict(Pool())
    for name, pool in tree["pools"].items():
        tree["pools"][name] = {key: value for key, value in pool.items() if value != blank[key]}
    return f"# {note} List prices as of {PRICES_AS_OF}.\n" + OmegaConf.to_yaml(OmegaConf.create(tree))
