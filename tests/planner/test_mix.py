import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_mixprec.errors import ConfigError
from miles_mixprec.planner.mix import Anchor, Demand, Limits, Mix, Offer, marginals, solve


def offer(name: str, price: float, slots: int, accelerator: str | None = None, **more: object) -> Offer:
    turns = more.pop("turns", None)
    width = more.pop("width", 1)
    return Offer(name, accelerator or name, width, price, (Anchor(1000, slots, turns),), **more)  # type: ignore[arg-type]


def brute_force(offers: list[Offer], demand: Demand, limits: Limits, most: int) -> float | None:
    """Cheapest hourly price over every combination of up to `most` engines per offer, or None."""
    best = None
    for counts in itertools.product(range(most + 1), repeat=len(offers)):
        capacity = [o.at(demand.context) for o in offers]
        slots = [n * c.slots for n, c in zip(counts, capacity, strict=True)]
        if sum(slots) < demand.sessions:
            continue
        if (
            demand.turns_per_hour
            > sum(n * (c.turns_per_hour or 0) for n, c in zip(counts, capacity, strict=True)) + 1e-9
        ):
            continue
        used: dict[str, int] = {}
        for n, o in zip(counts, offers, strict=True):
            used[o.accelerator] = used.get(o.accelerator, 0) + n * o.accelerators_per_engine
        if any(used.get(name, 0) > count for name, count in limits.available.items()):
            continue
        if any(s > o.max_share * sum(slots) + 1e-9 for s, o in zip(slots, offers, strict=True)):
            continue
        if limits.max_kl is not None:
            total = sum(s * (o.kl or 0) for s, o in zip(slots, offers, strict=True))
            if total > limits.max_kl * sum(slots) + 1e-9:
                continue
        price = sum(n * o.price for n, o in zip(counts, offers, strict=True))
        best = price if best is None else min(best, price)
    return best


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Offer], Demand, Limits]:
    accelerators = ["a", "b"]
    offers = [
        offer(
            f"o{i}",
            price=draw(st.integers(1, 60)) / 4,
            slots=draw(st.integers(1, 12)),
            accelerator=draw(st.sampled_from(accelerators)),
            width=draw(st.integers(1, 2)),
            turns=float(draw(st.integers(1, 20))),
            kl=draw(st.integers(1, 8)) / 8,
            max_share=draw(st.sampled_from([1.0, 1.0, 0.75, 0.5])),
        )
        for i in range(draw(st.integers(1, 3)))
    ]
    rate = draw(st.sampled_from([0.0, 1.0]))
    demand = Demand(draw(st.integers(1, 40)), rate, draw(st.integers(1, 30)), context=1000)
    available = draw(st.fixed_dictionaries({name: st.integers(0, 8) for name in accelerators}))
    return offers, demand, Limits(available, draw(st.sampled_from([None, 0.5, 0.75])))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_optimal_against_brute_force(problem: tuple[list[Offer], Demand, Limits]) -> None:
    offers, demand, limits = problem
    expected = brute_force(offers, demand, limits, most=8)
    if expected is None:
        with pytest.raises(ConfigError, match="no mix carries"):
            solve(offers, demand, limits)
    else:
        mix = solve(offers, demand, limits)
        assert mix.hourly == pytest.approx(expected)
        assert mix.lp_bound <= mix.hourly + 1e-6


@pytest.mark.parametrize("seed", range(12))
def test_large_instances_stay_within_a_percent_of_the_relaxation(seed: int) -> None:
    rng = random.Random(seed)
    offers = []
    for i in range(48):
        width, slots = rng.choice([1, 2, 4]), rng.randint(8, 64)
        price = width * rng.uniform(2, 8)
        offers.append(offer(f"o{i}", price, slots, f"gpu{i % 12}", width=width, max_share=rng.choice([1.0, 0.3])))
    limits = Limits({f"gpu{i}": rng.randint(20, 200) for i in range(12)})
    mix = solve(offers, Demand(8000, context=1000), limits)
    assert mix.slots >= 8000
    assert mix.hourly <= 1.01 * mix.lp_bound


def test_docstring_example() -> None:
    mix = solve([offer("h200", 4.54, 32), offer("b300", 7.10, 48)], Demand(100, context=1000))
    assert mix == Mix({"h200": 2, "b300": 1}, 112, None, pytest.approx(16.18), pytest.approx(14.1875))


def test_turn_rates_carry_a_demand_of_updates() -> None:
    offers = [offer("slow", 1.0, 10, turns=100.0), offer("fast", 1.5, 10, turns=200.0)]
    mix = solve(offers, Demand(updates_per_hour=2, turns_per_update=300, context=1000))
    assert mix.engines == {"fast": 3}
    assert mix.turns_per_hour == 600


def test_kl_bound_buys_exacter_pools() -> None:
    offers = [offer("nvfp4", 1.0, 10, kl=0.04), offer("bf16", 2.0, 10, kl=0.01)]
    free = solve(offers, Demand(100, context=1000))
    bound = solve(offers, Demand(100, context=1000), Limits(max_kl=0.025))
    assert free.engines == {"nvfp4": 10}
    assert bound.engines == {"nvfp4": 5, "bf16": 5}


@pytest.mark.parametrize(
    ("offers", "demand", "limits", "message"),
    [
        ([], Demand(1), Limits(), "no offers to plan with"),
        ([offer("a", 1, 1)], Demand(), Limits(), "no demand; state sessions"),
        ([offer("a", 1, 1)], Demand(updates_per_hour=1, turns_per_update=1), Limits(), "a: has no turn rate"),
        ([offer("a", 1, 1)], Demand(1), Limits(max_kl=0.1), "a: has no measured KL"),
        (
            [offer("a", 1, 4)],
            Demand(9, context=1000),
            Limits({"a": 2}),
            r"9 sessions: the limits \(available a\) allow 8",
        ),
        (
            [offer("a", 1, 4, turns=50.0)],
            Demand(8, 1, 600, context=1000),
            Limits({"a": 2}),
            r"8 sessions and 600 turns: the limits \(available a\) allow 8 and 100;",
        ),
        (
            [offer("a", 1, 4)],
            Demand(1, context=9000),
            Limits(),
            r"1 sessions: the limits \(what an engine holds\) allow 0;",
        ),
    ],
)
def test_refusals(offers: list[Offer], demand: Demand, limits: Limits, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        solve(offers, demand, limits)


def test_capacity_between_and_beyond_anchors() -> None:
    measured = Offer("a", "a", 1, 1.0, (Anchor(60_000, 40, 4000.0), Anchor(100_000, 20, 3000.0)))
    assert measured.at(20_000) == Anchor(20_000, 40, 4000.0)
    assert measured.at(80_000) == Anchor(80_000, 30, 3500.0)
    assert measured.at(200_000) == Anchor(200_000, 10, 1500.0)


@given(st.integers(1, 400_000), st.integers(1, 400_000))
def test_capacity_never_grows_with_the_context(a: int, b: int) -> None:
    measured = Offer("a", "a", 1, 1.0, (Anchor(60_000, 40), Anchor(100_000, 20)))
    assert measured.at(min(a, b)).slots >= measured.at(max(a, b)).slots


def test_marginals_price_the_next_session_and_accelerator() -> None:
    offers = [offer("cheap", 1.0, 10), offer("dear", 3.0, 10), offer("dearest", 5.0, 10)]
    values = marginals(offers, Demand(100, context=1000), Limits({"cheap": 4}))
    assert values.session == pytest.approx(0.3)
    assert values.accelerator == {"cheap": pytest.approx(2.0)}
    assert values.reduced["dearest"] == pytest.approx(2.0)
