from __future__ import annotations

import math
from dataclasses import replace

import pytest
from claims.judge import FAILS, HOLDS, OPEN, PARTLY, Evidence, Judgement, judge_all, slot_prices
from claims.study import Cell, load_study
from evidence import AS_PUBLISHED, UPDATES, Run, collapses_at, evidence, stable
from traces import grpo_top_p_length, pool

from miles_mixprec.guard.signals import Mean, Signals


def verdicts(given: Evidence) -> dict[str, str]:
    return {j.number: j.verdict for j in judge_all(given)}


def judgement(given: Evidence, number: str) -> Judgement:
    return next(j for j in judge_all(given) if j.number == number)


def test_runs_like_the_published_ones_uphold_every_claim() -> None:
    found = verdicts(evidence())
    assert found.pop("7") == OPEN, "no run on a CPU can tell"
    assert found == dict.fromkeys(["1a", "1b", "2a", "2b", "2c", "3a", "3b", "4", "5a", "5b", "6a", "6b"], HOLDS)


def test_runs_that_all_stay_healthy_uphold_nothing_about_collapse() -> None:
    found = verdicts(evidence({}))
    assert found["1a"] == FAILS
    assert {found[n] for n in ("1b", "2a", "2b", "2c", "3a", "3b", "5a", "5b")} == {OPEN}
    assert found["4"] == HOLDS


def test_no_data_no_judgement() -> None:
    nothing = Evidence(load_study("claims"), [], [])
    assert set(verdicts(nothing).values()) == {OPEN}


def changed(arm: str, fleet: str, run: Run) -> Evidence:
    return evidence({**AS_PUBLISHED, (arm, fleet): run})


def seeds(*runs: Run) -> Run:
    return lambda cell: runs[cell.seed](cell)


@pytest.mark.parametrize(
    ("arm", "fleet", "run", "number", "verdict"),
    [
        ("grpo", "mixed", seeds(collapses_at(25), collapses_at(25), stable), "1a", PARTLY),
        ("grpo", "homogeneous", collapses_at(20), "1b", FAILS),
        ("grpo", "homogeneous", stable, "1b", PARTLY),
        ("mis", "mixed", stable, "2a", FAILS),
        ("mis", "mixed", collapses_at(15), "2a", PARTLY),
        ("sc", "mixed", seeds(stable, stable, collapses_at(40)), "2b", PARTLY),
        ("sc_mis", "homogeneous", collapses_at(70), "3a", PARTLY),
        ("sc_mis_top_p", "mixed", seeds(stable, collapses_at(70), stable), "3b", PARTLY),
        ("sc", "mixed", collapses_at(33, lead=-4), "5b", FAILS),
    ],
)
def test_each_claim_can_fail(arm: str, fleet: str, run: Run, number: str, verdict: str) -> None:
    assert verdicts(changed(arm, fleet, run))[number] == verdict


def test_outliving_grpo_must_be_long_enough_to_count() -> None:
    late = {**AS_PUBLISHED, ("grpo", "mixed"): collapses_at(60), ("mis", "mixed"): stable}
    assert verdicts(evidence(late))["2a"] == OPEN


def test_onsets_and_their_spread_are_stated() -> None:
    assert judgement(evidence(), "1a").ours == "3 of 3 collapsed, update 30 (28-32)"
    assert judgement(evidence({}), "1a").ours == f"0 of 3 collapsed in {UPDATES} updates"


@pytest.mark.parametrize(("mixed", "verdict"), [(0.76, HOLDS), (0.9, HOLDS), (0.7, FAILS)])
def test_parity(mixed: float, verdict: str) -> None:
    found = judgement(evidence(pass_4={"mixed": mixed}), "4")
    assert found.verdict == verdict
    assert "KL 5.0 times" in found.ours


def test_parity_at_equal_kl_says_nothing() -> None:
    def mild(cell: Cell) -> list[Signals]:
        return [replace(s, kl=Mean(1.2e-3, 1)) for s in stable(cell)]

    assert verdicts(changed("sc_mis_top_p", "mixed", mild))["4"] == OPEN


def test_a_collapse_that_heals_counts_and_is_said_to_have_recovered() -> None:
    def dips(cell: Cell) -> list[Signals]:
        whole = stable(cell)
        return whole[:40] + [replace(s, update=n) for n, s in enumerate(collapses_at(0)(cell)[40:50], 40)] + whole[50:]

    given = changed("sc_mis", "mixed", dips)
    assert judgement(given, "3a").ours.startswith("3 of 6 collapsed, update 42 (42-42), 3 recovered")
    assert verdicts(given)["3a"] == PARTLY


def test_a_collapse_in_the_other_mode_lacks_signs() -> None:
    given = changed("grpo_top_p", "mixed", lambda cell: grpo_top_p_length()[:UPDATES])
    found = judgement(given, "5a")
    assert found.verdict == PARTLY and "length 3" in found.ours


def test_curves_that_part() -> None:
    def flatter(cell: Cell) -> list[Signals]:
        return [replace(s, entropy=Mean(0.5, 1), grad_norm=math.inf) for s in stable(cell)]

    given = changed("sc_mis_top_p", "mixed", flatter)
    assert verdicts(given)["6a"] == FAILS
    assert verdicts(given)["6b"] == OPEN, "no finite gradient norm to compare"


def test_cost_stands_in_published_pools_at_list_prices() -> None:
    study = load_study("claims")
    assert slot_prices(study, "mixed") == pytest.approx({"bf16": 4.54 / 16, "fp8": 4.54 / 32, "nvfp4": 7.10 / 48})
    assert slot_prices(study, "homogeneous") == pytest.approx({"bf16": 6.25 / 32})


def test_modelled_cost_weighs_each_pool_by_its_turns() -> None:
    served = {"mixed": {"fp8": pool(kl=1e-3), "nvfp4": pool(kl=1e-3)}, "homogeneous": {"bf16": pool(kl=1e-3)}}

    def trace(cell: Cell) -> list[Signals]:
        return [replace(s, pools=served[cell.fleet]) for s in stable(cell)]

    given = evidence({("sc_mis_top_p", fleet): trace for fleet in served})
    mixed, single = (4.54 / 32 + 7.10 / 48) / 2, 6.25 / 32
    found = judgement(given, "7")
    assert f"{mixed / single - 1:+.0%} per turn" in found.ours
    assert f"{2 * mixed / single - 1:+.0%} per update (120 and 60 turns)" in found.ours
    unpriced = replace(given, study=replace(given.study, stand_ins={}))
    assert judgement(unpriced, "7").ours == "-"
