"""What a fleet costs: billed for as long as it is provisioned, busy for as much of it as is used.

Only the first is on the invoice; the second is what published cost-per-update figures usually state.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles_mixprec.config import Fleet
from miles_mixprec.fleet.accelerators import hourly_price


@dataclass(frozen=True)
class MachinePrices:
    """$ per hour of one CPU core and of one GiB of main memory, if billed apart from accelerators."""

    core: float = 0.0
    gib: float = 0.0


INCLUDED = MachinePrices()


@dataclass(frozen=True)
class FleetCost:
    """$ per hour of a fleet as provisioned, and the part of it that `sessions` keep busy."""

    name: str
    engines: int
    accelerators: int
    slots: int
    accelerator_hourly: float
    machine_hourly: float
    sessions: int

    @property
    def billed(self) -> float:
        return self.accelerator_hourly + self.machine_hourly

    @property
    def busy(self) -> float:
        """Sessions beyond the slots wait, or miss the latency target; they cost nothing more."""
        return self.billed * min(1.0, self.sessions / self.slots)

    @property
    def idle(self) -> float:
        return self.billed - self.busy


def fleet_cost(fleet: Fleet, sessions: int | None = None, machine: MachinePrices = INCLUDED) -> FleetCost:
    """Cost of `fleet` with `sessions` running (default: all slots).

    Pools that state no `cpus` or `memory_gib` are charged for accelerators alone.
    """
    pools = fleet.pools.values()
    cores = sum(pool.engines * (pool.cpus or 0) for pool in pools)
    gib = sum(pool.engines * (pool.memory_gib or 0) for pool in pools)
    return FleetCost(
        name=fleet.name,
        engines=sum(pool.engines for pool in pools),
        accelerators=sum(pool.engines * pool.accelerators_per_engine for pool in pools),
        slots=fleet.slots,
        accelerator_hourly=sum(pool.engines * hourly_price(pool) for pool in pools),
        machine_hourly=cores * machine.core + gib * machine.gib,
        sessions=fleet.slots if sessions is None else sessions,
    )
