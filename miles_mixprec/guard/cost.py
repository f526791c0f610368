"""What an update's samples cost, per pool, in two ways that must not be mixed up (docs/cost.md).

*Billed*: what the provider charges for the pool's engines while the update lasts, idle or not. *Busy*: what the
samples would cost at the pool's benchmarked rate, as if nothing idled.
"""

from __future__ import annotations

from collections.abc import Mapping

from miles_mixprec.config import Fleet
from miles_mixprec.fleet.accelerators import hourly_price


def billed(fleet: Fleet, seconds: float) -> dict[str, float]:
    """$ per pool for `seconds` of the whole fleet as provisioned."""
    return {name: pool.engines * hourly_price(pool) * seconds / 3600 for name, pool in fleet.pools.items()}


def busy(fleet: Fleet, work: Mapping[str, float], rates: Mapping[str, float]) -> dict[str, float]:
    """$ per pool for `work` (tokens, or turns) at the `rates` (tokens, or turns, per hour and engine) of a benchmark.

    A pool without a benchmarked rate is left out: a guess would pass for a measurement.
    """
    return {
        name: work.get(name, 0.0) / rates[name] * hourly_price(pool)
        for name, pool in fleet.pools.items()
        if name in rates
    }
