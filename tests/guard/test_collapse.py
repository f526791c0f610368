from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import flat, grpo_mixed, grpo_top_p_length, healthy_mixed, ramp, run, sc_mixed, wobble

from miles_mixprec.config import Guard as Thresholds
from miles_mixprec.guard.collapse import LENGTH, THREE_SIGNS, Guard, Level, Verdict, judge
from miles_mixprec.guard.signals import Mean, Signals


def first(verdicts: list[Verdict], level: Level) -> Verdict:
    return next(v for v in verdicts if v.level >= level)


def test_grpo_collapse_is_called_before_most_episodes_are_lost() -> None:
    verdicts = judge(Thresholds(), grpo_mixed())
    collapse = first(verdicts, Level.COLLAPSE)
    assert collapse.mode == THREE_SIGNS
    assert 30 < collapse.update <= 40
    assert all(v.level <= Level.HEALTHY for v in verdicts[:22])


def test_tail_ratio_warns_ten_updates_before_score_centering_collapses() -> None:
    verdicts = judge(Thresholds(), sc_mixed())
    warning, collapse = first(verdicts, Level.WARNING), first(verdicts, Level.COLLAPSE)
    assert warning.update in (34, 35, 36)
    assert len(warning.reasons) == 1 and warning.reasons[0].startswith("tail ratio")
    assert warning.update + 5 <= collapse.update <= 49


def test_length_mode_is_called_without_format_errors() -> None:
    verdicts = judge(Thresholds(), grpo_top_p_length())
    collapse = first(verdicts, Level.COLLAPSE)
    assert collapse.mode == LENGTH
    assert 65 < collapse.update < 90


def test_a_healthy_run_at_high_kl_raises_no_alarm() -> None:
    verdicts = judge(Thresholds(), healthy_mixed())
    assert {v.level for v in verdicts[5:]} == {Level.HEALTHY}
    assert not any(v.pools_to_quarantine for v in verdicts)


@settings(max_examples=10, deadline=None)
@given(st.floats(1e-6, 1e3))
def test_the_level_of_kl_does_not_matter(level: float) -> None:
    def scaled(signals: Signals) -> Signals:
        return replace(signals, kl=Mean(signals.kl.num * level, signals.kl.den))

    for trace in (healthy_mixed(), grpo_mixed()):
        assert [v.level for v in judge(Thresholds(), map(scaled, trace))] == [
            v.level for v in judge(Thresholds(), trace)
        ]


def test_one_faulty_pool_is_quarantined_and_only_that_one() -> None:
    trace = run(
        30,
        kl=flat(3e-3),
        pool_kl={"a": wobble(flat(1e-3), 0.3), "b": wobble(flat(5e-3), 0.3), "c": ramp(3e-3, 3e-1, 12, 14)},
    )
    verdicts = judge(Thresholds(), trace)
    assert all(v.pools_to_quarantine == () for v in verdicts[:14])
    assert verdicts[20].pools_to_quarantine == ("c",)
    assert verdicts[20].level == Level.WARNING
    assert "pool c" in verdicts[20].reasons[0]


def test_a_bf16_pool_that_starts_at_rounding_error_may_grow_stale() -> None:
    trace = run(
        30,
        kl=flat(2e-2),
        pool_kl={"bf16": ramp(1e-13, 1e-2, 0, 15), "fp8": ramp(1e-4, 1e-2, 0, 15), "nvfp4": flat(5e-2)},
    )
    assert not any(v.pools_to_quarantine for v in judge(Thresholds(), trace))


def test_a_run_whose_pools_all_drift_quarantines_none() -> None:
    trace = run(30, pool_kl={name: ramp(1e-3, 1e-1, 12, 20) for name in "abc"})
    assert not any(v.pools_to_quarantine for v in judge(Thresholds(), trace))


def test_a_single_pool_is_never_quarantined() -> None:
    trace = run(30, pool_kl={"only": ramp(1e-3, 1e-1, 12, 20)})
    assert not any(v.pools_to_quarantine for v in judge(Thresholds(), trace))


@pytest.mark.parametrize("patience", [1, 2, 4])
def test_a_sign_must_last(patience: int) -> None:
    thresholds = Thresholds(patience=patience)
    spike = run(30, kl=lambda n: 1.0 if 10 <= n < 10 + patience - 1 else 1e-3)
    lasting = run(30, kl=lambda n: 1.0 if 10 <= n < 10 + patience else 1e-3)
    assert not any(v.level == Level.WARNING for v in judge(thresholds, spike))
    assert [v.update for v in judge(thresholds, lasting) if v.level == Level.WARNING] == [10 + patience - 1]


def test_an_update_without_the_figure_does_not_break_a_row() -> None:
    trace = run(12, kl=ramp(1e-3, 1.0, 6, 7))
    trace[8] = replace(trace[8], kl=Mean())
    assert [v.level for v in judge(Thresholds(), trace)][7:11] == [
        Level.HEALTHY,
        Level.HEALTHY,
        Level.HEALTHY,
        Level.WARNING,
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_counts_as_grown(value: float) -> None:
    trace = run(12, grad_norm=lambda n: value if n >= 7 else 0.2)
    assert first(judge(Thresholds(), trace)[5:], Level.WARNING).update == 9


def test_format_errors_of_the_starting_model_are_not_a_sign() -> None:
    assert all(v.level <= Level.HEALTHY for v in judge(Thresholds(), run(40, format_errors=wobble(flat(0.55), 0.2))))
    assert judge(Thresholds(), run(40, format_errors=ramp(0.55, 0.9, 20, 22)))[-1].level == Level.WARNING


def test_signs_that_the_start_says_nothing_of_are_left_out() -> None:
    bare = [Signals(update=n, reward=Mean(0.4, 1)) for n in range(20)]
    assert {v.level for v in judge(Thresholds(), bare)} == {Level.BASELINE, Level.HEALTHY}


def test_replaying_a_log_gives_the_verdicts_of_the_run() -> None:
    guard = Guard(Thresholds())
    live = [guard.update(s) for s in sc_mixed()]
    assert live == judge(Thresholds(), sc_mixed())
