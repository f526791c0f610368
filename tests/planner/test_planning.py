import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from miles_mixprec.config import Fleet, Pool, load_fleet
from miles_mixprec.errors import ConfigError
from miles_mixprec.planner.cost import MachinePrices, fleet_cost
from miles_mixprec.planner.mix import Anchor, Demand, Limits, solve
from miles_mixprec.planner.plan import (
    anchor_of,
    explain,
    fleet_yaml,
    grow,
    offers_of,
    planned_fleet,
    read_measurements,
    verdict,
)

DEMAND = Demand(1344, context=64_000)


def curve(*points: tuple[int, float, float], pool: str = "h200_fp8", context: int = 50_000) -> dict:
    rows = [{"sessions": s, "turns_per_hour": t, "p90_s": p} for s, t, p in points]
    return {"pool": pool, "context": context, "points": rows}


def test_article_pools_carry_the_load_a_quarter_cheaper_than_the_baseline() -> None:
    offers = offers_of(load_fleet(["fleet=article_mixed"]), context=64_000)
    free = solve(offers, DEMAND)
    limited = solve(offers, DEMAND, Limits({"h200": 24, "b300": 24}))
    assert free.engines == {"h200_fp8": 42}
    assert limited.engines == {"h200_fp8": 24, "b300_nvfp4": 12}
    assert limited.hourly <= 0.75 * 262.5
    assert free.hourly == pytest.approx(free.lp_bound) == pytest.approx(190.68)


def test_verdict_says_when_a_mix_is_not_cheaper() -> None:
    offers = offers_of(load_fleet(["fleet=article_mixed"]), context=64_000)
    text = verdict(offers, DEMAND, Limits(), solve(offers, DEMAND))
    assert text == "A mix is not cheaper: 42 engines of h200_fp8 alone cost $190.68/h."


def test_verdict_compares_within_and_without_limits() -> None:
    offers = offers_of(load_fleet(["fleet=article_mixed"]), context=64_000)
    limits = Limits({"h200": 24, "b300": 24})
    text = verdict(offers, DEMAND, limits, solve(offers, DEMAND, limits))
    assert "26.0% less than the cheapest single pool, b200_nvfp4 at $262.50/h" in text
    assert "42 engines of it alone would cost $190.68/h, 1.8% less than this mix" in text


def test_explanation_names_the_limit_and_its_worth() -> None:
    offers = offers_of(load_fleet(["fleet=article_mixed"]), context=64_000)
    limits = Limits({"h200": 24, "b300": 24})
    lines = explain(offers, DEMAND, limits, solve(offers, DEMAND, limits))
    assert lines[0] == "h200_fp8: 24 engines of 32 slots at $0.142 per slot-hour; all 24 h200 are used"
    assert any(line.startswith("b200_nvfp4: 0 engines") and "would have to be $1.52 per" in line for line in lines)
    assert "limit on h200: one more would save $0.19 per hour" in lines
    assert len(lines) == 8 + 2


def test_explanation_names_a_share_cap() -> None:
    fleet = load_fleet(["fleet=article_mixed", "fleet.pools.h200_fp8.max_share=0.5"])
    offers = offers_of(fleet, context=64_000)
    mix = solve(offers, DEMAND)
    assert mix.engines["h200_fp8"] * 32 <= 0.5 * mix.slots
    assert "at its cap of 50% of the slots" in explain(offers, DEMAND, Limits(), mix)[0]


@pytest.mark.parametrize(
    ("slots", "available", "hourly"),
    [
        ({}, {"h100": 16, "h200": 16, "b200": 8, "b300": 8, "a100-80gb": 8, "rtx-pro-6000": 8}, 226.84),
        ({}, {"h200": 16, "b300": 8}, 216.94),
        ({"b300_nvfp4": 24}, {"h200": 24, "b300": 24}, 221.46),
        ({"h200_fp8": 24}, {}, 198.80),
    ],
)
def test_documented_plans(slots: dict[str, int], available: dict[str, int], hourly: float) -> None:
    """The figures of docs/cost.md."""
    changes = [f"fleet.pools.{name}.slots_per_engine={count}" for name, count in slots.items()]
    offers = offers_of(load_fleet(["fleet=article_mixed", *changes]), context=64_000)
    assert solve(offers, DEMAND, Limits(available)).hourly == pytest.approx(hourly)


def test_growing_contexts_replan() -> None:
    offers = offers_of(load_fleet(["fleet=article_mixed"]), context=64_000)
    first, second = grow(offers, Demand(1344), [(60, 64_000), (140, 94_000)])
    assert first.change == {"h200_fp8": 42}
    assert second.mix.slots >= 1344
    assert second.mix.hourly > first.mix.hourly
    assert {name: first.mix.engines.get(name, 0) + second.change.get(name, 0) for name in second.mix.engines} == (
        second.mix.engines
    )


def test_planned_fleet_survives_its_yaml(tmp_path: Path) -> None:
    fleet = load_fleet(["fleet=article_mixed"])
    offers = offers_of(fleet, context=64_000)
    mix = solve(offers, Demand(1344, context=94_000), Limits({"h200": 24}))
    planned = planned_fleet(fleet, mix, 94_000, offers)
    assert {name: pool.engines for name, pool in planned.pools.items()} == mix.engines
    assert planned.slots == mix.slots
    assert fleet.slots == 1376, "the candidate fleet is left alone"
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet" / "mine.yaml").write_text(fleet_yaml(planned, "Note."))
    (tmp_path / "config.yaml").write_text("defaults: [schema, {fleet: mine}, _self_]\n")
    assert load_fleet(conf_dir=tmp_path) == planned
    assert OmegaConf.load(tmp_path / "fleet" / "mine.yaml").get("modal") is None


def test_anchor_is_where_p90_reaches_the_bound() -> None:
    result = curve((8, 800, 4.0), (16, 1400, 8.0), (32, 1600, 16.0))
    assert anchor_of(result, 10.0) == Anchor(50_000, 20, 1450.0)
    assert anchor_of(result, 100.0) == Anchor(50_000, 32, 1600.0)
    with pytest.raises(ConfigError, match=r"p90 turn latency is 4\.0 s at 8 sessions already, above the bound of 3 s"):
        anchor_of(result, 3.0)


def test_anchor_ignores_a_curve_that_dips_below_the_bound_again() -> None:
    assert anchor_of(curve((8, 800, 4.0), (16, 900, 20.0), (32, 2000, 6.0)), 12.0).slots == 12


def test_measurements_replace_published_slots(tmp_path: Path) -> None:
    for context, slots in [(90_000, 10), (40_000, 20)]:
        (tmp_path / f"{context}.json").write_text(json.dumps(curve((slots, 100.0, 1.0), context=context)))
    measured = read_measurements(sorted(tmp_path.iterdir()), latency_s=10)
    assert measured == {"h200_fp8": (Anchor(40_000, 20, 100.0), Anchor(90_000, 10, 100.0))}
    offers = offers_of(load_fleet(["fleet=article_mixed"]), context=64_000, measured=measured)
    assert {o.name: o.at(65_000).slots for o in offers}["h200_fp8"] == 15
    with pytest.raises(ConfigError, match="pool nope: measured, but not in fleet article_mixed"):
        offers_of(load_fleet(["fleet=article_mixed"]), context=64_000, kl={"nope": 0.1})


def test_costs_are_billed_busy_and_idle() -> None:
    mixed = fleet_cost(load_fleet(["fleet=article_mixed"]), 1344)
    homogeneous = fleet_cost(load_fleet(["fleet=article_homogeneous"]), 1344)
    assert mixed.billed == pytest.approx(286.88)
    assert mixed.busy == pytest.approx(286.88 * 1344 / 1376)
    assert mixed.busy + mixed.idle == pytest.approx(mixed.billed)
    assert mixed.billed / homogeneous.billed - 1 == pytest.approx(0.093, abs=5e-4), "dearer as provisioned"
    assert homogeneous.idle == 0


def test_machine_prices_are_added_where_stated() -> None:
    fleet = Fleet(
        name="f",
        pools={
            "a": Pool(view="bf16", accelerator="h100", engines=2, slots_per_engine=4, cpus=10, memory_gib=100),
            "b": Pool(view="bf16", accelerator="h100", engines=1, slots_per_engine=4),
        },
    )
    cost = fleet_cost(fleet, 12, MachinePrices(core=0.05, gib=0.01))
    assert cost.accelerator_hourly == pytest.approx(3 * 3.95)
    assert cost.machine_hourly == pytest.approx(2 * (10 * 0.05 + 100 * 0.01))
    prices = {o.name: o.price for o in offers_of(fleet, context=1, machine=MachinePrices(0.05, 0.01))}
    assert prices == {"a": pytest.approx(3.95 + 1.5), "b": pytest.approx(3.95)}
