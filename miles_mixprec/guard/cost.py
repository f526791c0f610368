"""What an update's samples cost, per pool, in two ways that must not be mixed up.

*Billed*: what the provider charges for the pool's engines while the update lasts, idle or not. *Busy*: what the
samples would cost at the pool's benchmarked rate, as if nothing idled. A mix can be cheaper by the second and dearer
by the first, so both are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from miles_mixprec.config import Fleet, Pool
from miles_mixprec.guard.signals import Signals

ListPrice = Callable[[str], float]  # accelerator name -> $ per accelerator-hour


def list_price(accelerator: str) -> float:
    """$ per accelerator-hour as shipped in `miles_mixprec.fleet.accelerators`; 0 where no price is known."""
    raise NotImplementedError


def hourly(pool: Pool, list_price: ListPrice) -> float:
    """$ per hour of all engines of `pool`, at its own price or else the accelerator's list price."""
    price = list_price(pool.accelerator) if pool.hourly_price is None else pool.hourly_price
    return pool.engines * pool.accelerators_per_engine * price


def billed(fleet: Fleet, seconds: float, list_price: ListPrice) -> dict[str, float]:
    """$ per pool for `seconds` of the whole fleet as provisioned."""
    return {name: hourly(pool, list_price) * seconds / 3600 for name, pool in fleet.pools.items()}


def busy(
    fleet: Fleet, work: Mapping[str, float], rates: Mapping[str, float], list_price: ListPrice
) -> dict[str, float]:
    """$ per pool for `work` (tokens, or turns) at the `rates` (tokens, or turns, per hour and engine) of a benchmark.

    A pool without a benchmarked rate is left out: a guess would pass for a measurement.
    """
    return {
        name: work.get(name, 0.0) / rates[name] * hourly(pool, list_price) / pool.engines
        for name, pool in fleet.pools.items()
        if name in rates
    }


def tokens(signals: Signals) -> dict[str, float]:
    """The work of `busy`, in response tokens."""
    return {name: pool.tokens for name, pool in signals.pools.items()}


def turns(signals: Signals) -> dict[str, float]:
    """The work of `busy`, in turns."""
    return {name: pool.turns for name, pool in signals.pools.items()}
