"""From a fleet's pools and measurements to a planned fleet, with the reasons."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from miles_mixprec.config import Fleet
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

    Capacity is what `measured` has for a pool, else `slots_per_engine` at `context` tokens (published, or a prior).
    Raises ConfigError for measurements or KLs of pools that the fleet lacks.
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
        result = json.loads(path.read_text())
        anchors.setdefault(result["pool"], []).append(anchor_of(result, latency_s))
    return {pool: tuple(sorted(found, key=lambda anchor: anchor.context)) for pool, found in anchors.items()}


def anchor_of(result: Mapping[str, Any], latency_s: float) -> Anchor:
    """Slots and turns per hour where p90 first reaches `latency_s`, linear between measured points.

    Raises ConfigError if p90 is above the bound at the first point already.
    """
    points = sorted(result["points"], key=lambda point: point["sessions"])
    within = [i for i, point in enumerate(points) if all(p["p90_s"] <= latency_s for p in points[: i + 1])]
    if not within:
        first = points[0]
        raise ConfigError(
            f"pool {result['pool']}: p90 turn latency is {first['p90_s']:.1f} s at {first['sessions']} sessions "
            f"already, above the bound of {latency_s:g} s; raise the bound or leave the pool out"
        )
    last = points[within[-1]]
    sessions, turns = float(last["sessions"]), float(last["turns_per_hour"])
    if within[-1] + 1 < len(points):
        following = points[within[-1] + 1]
        part = (latency_s - last["p90_s"]) / (following["p90_s"] - last["p90_s"])
        sessions += part * (following["sessions"] - last["sessions"])
        turns += part * (following["turns_per_hour"] - last["turns_per_hour"])
    return Anchor(int(result["context"]), int(sessions), turns)


def single_pool_mixes(offers: Sequence[Offer], demand: Demand, limits: Limits = NO_LIMITS) -> dict[str, Mix]:
    """For every offer that can carry the demand alone: its mix, without share caps."""
    mixes = {}
    for offer in offers:
        try:
            mixes[offer.name] = solve([replace(offer, max_share=1.0)], demand, limits)
        except ConfigError:
            continue
    return mixes


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
    lines = []
    for offer in sorted(offers, key=lambda offer: _per_slot(offer, demand.context)):
        slots = offer.at(demand.context).slots
        count = mix.engines.get(offer.name, 0)
        text = (
            f"{offer.name}: {count} engines of {slots} slots at ${_per_slot(offer, demand.context):.3f} per slot-hour"
        )
        used = sum(
            mix.engines.get(o.name, 0) * o.accelerators_per_engine
            for o in offers
            if o.accelerator == offer.accelerator
        )
        limit = limits.available.get(offer.accelerator)
        if slots == 0:
            text += f"; not a single session of {demand.context:,} tokens fits"
        elif count and limit is not None and used + offer.accelerators_per_engine > limit:
            text += f"; all {limit} {offer.accelerator} are used"
        elif count and offer.max_share < 1 and (count + 1) * slots > offer.max_share * (mix.slots + slots):
            text += f"; at its cap of {offer.max_share:.0%} of the slots"
        elif count:
            text += "; cheapest that is left"
        elif values.reduced[offer.name] > 1e-9:
            text += f"; would have to be ${values.reduced[offer.name]:.2f} per engine-hour cheaper"
        else:
            text += "; no cheaper than what is used"
        lines.append(text)
    for name, saving in values.accelerator.items():
        if saving > 1e-9:
            lines.append(f"limit on {name}: one more would save ${saving:.2f} per hour")
    lines.append(f"next session: ${values.session:.3f} per hour; no mix costs less than ${mix.lp_bound:.2f} per hour")
    return lines


def verdict(offers: Sequence[Offer], demand: Demand, limits: Limits, mix: Mix) -> str:
    """Whether mixing pays against the cheapest fleet of one pool within the limits, and without them."""
    singles = single_pool_mixes(offers, demand, limits)
    free = single_pool_mixes(offers, demand, replace(limits, available={}))
    texts = []
    if singles:
        name, best = min(singles.items(), key=lambda item: item[1].hourly)
        saving = 1 - mix.hourly / best.hourly
        if saving < 1e-9:
            texts.append(
                f"A mix is not cheaper: {best.engines[name]} engines of {name} alone cost ${best.hourly:.2f}/h."
            )
        else:
            texts.append(
                f"The mix costs {saving:.1%} less than the cheapest single pool, {name} at ${best.hourly:.2f}/h."
            )
    else:
        texts.append("No single pool carries the demand within the limits; only a mix does.")
    if free:
        name, best = min(free.items(), key=lambda item: item[1].hourly)
        if best.hourly < mix.hourly - 1e-9:
            texts.append(
                f"With enough {name} available, {best.engines[name]} engines of it alone would cost "
                f"${best.hourly:.2f}/h, {1 - best.hourly / mix.hourly:.1%} less than this mix."
            )
    return " ".join(texts)


def planned_fleet(fleet: Fleet, mix: Mix, context: int, offers: Sequence[Offer], name: str = "planned") -> Fleet:
    """`fleet` with the engines of `mix`, pools without any left out, and slots as planned at `context`."""
    planned = copy.deepcopy(fleet)
    planned.name = name
    capacity = {offer.name: offer.at(context).slots for offer in offers}
    planned.pools = {name: pool for name, pool in planned.pools.items() if name in mix.engines}
    for name, pool in planned.pools.items():
        pool.engines = mix.engines[name]
        pool.slots_per_engine = capacity[name]
        pool.max_engines = None
        pool.min_engines = min(pool.min_engines, pool.engines)
    return planned


def fleet_yaml(fleet: Fleet, note: str) -> str:
    """A Hydra fleet file with `note` and the date of the prices on top; values at their defaults are left out."""
    tree = OmegaConf.to_container(OmegaConf.structured(fleet))
    assert isinstance(tree, dict)
    tree["pools"] = {name: _set_values(pool, fleet.pools[name]) for name, pool in tree["pools"].items()}
    if fleet.modal == type(fleet.modal)():
        del tree["modal"]
    return f"# {note} List prices as of {PRICES_AS_OF}.\n" + OmegaConf.to_yaml(OmegaConf.create(tree))


def _set_values(values: dict[str, Any], pool: Any) -> dict[str, Any]:
    blank = OmegaConf.to_container(OmegaConf.structured(type(pool)))
    assert isinstance(blank, dict)
    return {key: value for key, value in values.items() if value != blank[key]}


def _per_slot(offer: Offer, context: int) -> float:
    slots = offer.at(context).slots
    return offer.price / slots if slots else float("inf")
