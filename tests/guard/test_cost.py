from __future__ import annotations

import pytest

from miles_mixprec.config import Fleet, Pool
from miles_mixprec.guard.cost import billed, busy

# The published mixed fleet's B200 NVFP4 and H100 BF16 pools; the CPU pool carries a modelled price of its own.
FLEET = Fleet(
    name="three",
    pools={
        "nvfp4": Pool(view="nvfp4", accelerator="b200", engines=8, slots_per_engine=32),
        "h100": Pool(view="bf16", accelerator="h100", accelerators_per_engine=2, engines=4, slots_per_engine=32),
        "cpu": Pool(view="bf16", engines=2, slots_per_engine=8, hourly_price=0.05),
    },
)


def test_billed_is_the_provisioned_fleet_whatever_it_served() -> None:
    assert billed(FLEET, 720) == pytest.approx({"nvfp4": 10.0, "h100": 6.32, "cpu": 0.02})


def test_busy_is_work_over_the_rate_of_an_engine() -> None:
    work = {"nvfp4": 9000.0, "h100": 500.0}
    rates = {"nvfp4": 4500.0, "h100": 1000.0}
    assert busy(FLEET, work, rates) == pytest.approx({"nvfp4": 2 * 6.25, "h100": 0.5 * 7.9})


def test_busy_never_exceeds_billed_at_full_load() -> None:
    hours, rates = 0.5, dict.fromkeys(FLEET.pools, 1000.0)
    full = {name: p.engines * rates[name] * hours for name, p in FLEET.pools.items()}
    assert busy(FLEET, full, rates) == pytest.approx(billed(FLEET, hours * 3600))
