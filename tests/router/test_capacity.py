"""The control law, and a fleet in simulated time under it."""

from __future__ import annotations

import itertools

import pytest
from fleet_simulator import Fleet, Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_mixprec.router.capacity import FLOOR, Latencies, Load, adjust, pressure, ramp, shares, weights

TARGET_S = 10.0


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (Load(active=10), 0.0),
        (Load(active=10, turn_p90_s=13.0), 1.3),
        (Load(active=10, kv_use=0.99, turn_p90_s=5.0), 1.1),
        (Load(active=48, running=47, queued=20), 20 / 47 / 0.25),
        (Load(active=2, running=1, queued=1), 0.0),  # one request in a queue is no queue
    ],
)
def test_pressure(load: Load, expected: float) -> None:
    assert pressure(load, TARGET_S) == pytest.approx(expected)


def test_a_slow_pool_shrinks_to_what_it_can_hold_and_no_further_while_it_drains() -> None:
    factor = 1.0
    for _ in range(50):  # its 48 pinned sessions stay
        factor = adjust(factor, 48, Load(active=48, turn_p90_s=13.0), TARGET_S)
    assert factor * 48 == pytest.approx(48 / 1.3, rel=0.01)
    held = adjust(factor, 48, Load(active=37, turn_p90_s=9.5), TARGET_S)
    assert held == factor, "between relief and target nothing changes"
    for _ in range(50):
        factor = adjust(factor, 48, Load(active=20, turn_p90_s=4.0), TARGET_S)
    assert factor == 1.0


@given(st.floats(0.01, 1), st.integers(0, 500), st.floats(0, 1), st.floats(0, 1e4), st.integers(0, 500))
def test_a_factor_keeps_its_bounds(factor: float, active: int, kv: float, p90: float, queued: int) -> None:
    load = Load(active=active, running=active, queued=queued, kv_use=kv, turn_p90_s=p90)
    assert FLOOR <= adjust(factor, 100, load, TARGET_S) <= 1.0


capacities = st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1000), max_size=6)


@given(capacities, st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 1), max_size=6))
@settings(max_examples=300)
def test_shares_sum_to_one_and_respect_caps(size: dict[str, float], caps: dict[str, float]) -> None:
    found = shares(size, caps)
    positive = [name for name, value in size.items() if value > 0]
    if not positive:
        assert set(found.values()) <= {0.0}
        return
    assert sum(found.values()) == pytest.approx(1.0)
    room = sum(caps.get(name, 1.0) for name in positive)
    for name, share in found.items():
        assert share <= caps.get(name, 1.0) * max(1.0, 1.0 / room) * (1 + 1e-9)
    free = [name for name in positive if found[name] < 0.999 * caps.get(name, 1.0)]
    for one, other in itertools.pairwise(free):  # those below their caps share as they can
        if room > 1:
            assert found[one] * size[other] == pytest.approx(found[other] * size[one], rel=1e-6)


def test_weights_send_new_sessions_where_live_ones_are_missing() -> None:
    size = {"slow": 100.0, "fast": 100.0}
    assert weights(size, {}, {}) == {"slow": 5.0, "fast": 5.0}
    assert weights(size, {}, {"slow": 80, "fast": 40}) == {"slow": 0.0, "fast": 25.0}
    assert weights(size, {"slow": 0.25}, {}) == {"slow": 2.5, "fast": 7.5}


def test_ramp() -> None:
    assert [ramp(age) for age in (0, 30, 60, float("inf"))] == [0.1, 0.5, 1.0, 1.0]


@given(st.lists(st.floats(0.002, 3600), min_size=5, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_are_within_a_bucket(times: list[float], q: float) -> None:
    window = Latencies()
    for seconds in times:
        window.add(seconds)
    found = window.quantile(q)
    exact = sorted(times)[min(len(times) - 1, max(0, -int(-q * len(times) // 1) - 1))]
    assert found is not None and exact / 1.16 <= found <= exact * 1.16
    window.fade(0.01)
    assert window.quantile(q) is None, "a window that has faded says nothing"


KINDS = {
    "h200-fp8": Kind(engines=2, slots=32, speed=190, kv_tokens=32 * 75e3),
    "b300-nvfp4": Kind(engines=2, slots=48, speed=190, kv_tokens=48 * 44e3),  # contexts outgrow this one
    "h100-bf16": Kind(engines=1, slots=32, speed=190, kv_tokens=32 * 65e3),
    "a100-bf16": Kind(engines=1, slots=12, speed=150, kv_tokens=12 * 75e3),
}


def test_growing_contexts_keep_the_latency_target_where_fixed_weights_do_not() -> None:
    fixed = Fleet(KINDS, adaptive=False, concurrent=175).run(hours=2.0, observe_last=0.5)
    live = Fleet(KINDS, adaptive=True, concurrent=175).run(hours=2.0, observe_last=0.5)
    assert fixed.p90("b300-nvfp4") > 2 * fixed.target_s
    for name in KINDS:
        assert live.p90(name) <= live.target_s, (name, live.p90(name))
    assert live.ended > 1.2 * fixed.ended


def test_concurrency_follows_capacity_although_slow_pools_hold_sessions_longer() -> None:
    kinds = {"fast": Kind(2, 50, 300, 1e9), "slow": Kind(2, 50, 60, 1e9)}
    share = {}
    for adaptive in (False, True):
        fleet = Fleet(kinds, adaptive=adaptive, concurrent=160, target_s=100).run(hours=2.0, observe_last=1.0)
        share[adaptive] = fleet.lived["slow"] / sum(fleet.lived.values())
    assert share[True] == pytest.approx(0.5, abs=0.02)
    assert share[False] > 0.6
