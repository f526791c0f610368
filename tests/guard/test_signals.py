from __future__ import annotations

import math
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from miles_mixprec.guard.signals import (
    EvalLine,
    Mean,
    MetricsLog,
    PoolRollout,
    RolloutLine,
    RunLogError,
    TrainLine,
    finished,
    read_signals,
    total,
)


def rollout(update: int, *, reward: float = 0.5) -> RolloutLine:
    fp8 = PoolRollout(samples=6, tokens=300, reward=1.0, turns=12, aborted=2, staleness=1.0, versions=(3, 5))
    bf16 = PoolRollout(samples=2, tokens=100, reward=0.0, turns=4, staleness=3.0, versions=(4, 4))
    return RolloutLine(
        update=update,
        time=10.0,
        reward=reward,
        samples=8,
        format_errors=2,
        length_capped=1,
        response_tokens=50.0,
        per_pool={"fp8": fp8, "bf16": bf16},
    )


def train(update: int, *, grad_norm: float | None = 0.5, **metrics: float | None) -> TrainLine:
    named = {f"mixprec/{key.replace('__', '/')}": value for key, value in metrics.items()}
    return TrainLine(update=update, time=12.0, seconds=2.0, grad_norm=grad_norm, metrics=named)


def test_signals_of_an_update(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(rollout(3))
    log.append(
        train(
            3,
            all__kl_num=2.0,
            all__kl_den=400.0,
            all__sampler_mass_num=300.0,
            all__trainer_mass_num=400.0,
            pool__fp8__kl_num=1.9,
            pool__fp8__kl_den=300.0,
            pool__bf16__kl_num=0.0,
            pool__bf16__kl_den=0.0,
            view__fp8__kl_num=1.9,
            view__fp8__kl_den=300.0,
            **{"lag__0-1__kl_num": 1.9, "lag__0-1__kl_den": 300.0},
        )
    )
    (signals,) = read_signals(tmp_path)
    assert signals.update == 3 and signals.seconds == 2.0 and signals.grad_norm == 0.5
    assert signals.reward.value == 0.5
    assert signals.kl.value == 0.005
    assert signals.tail_ratio.value is None, "not logged"
    assert signals.format_errors.value == 0.25
    assert signals.length_capped.value == 0.125
    assert signals.response_tokens.value == 50
    assert signals.staleness.value == (6 * 1 + 2 * 3) / 8
    fp8, bf16 = signals.pools["fp8"], signals.pools["bf16"]
    assert fp8.share.value == 0.75 and bf16.share.value == 0.25
    assert fp8.aborted.value == 0.25
    assert fp8.versions == (3, 5)
    assert fp8.kl.value == pytest.approx(1.9 / 300)
    assert bf16.kl.value is None, "no token of this pool carried a gradient"
    assert {lag: kl.value for lag, kl in signals.kl_by_lag.items()} == {"0-1": pytest.approx(1.9 / 300)}
    assert signals.mass_ratio.value == 0.75


def test_means_of_parts_add_up_to_the_mean_of_the_whole() -> None:
    assert total([Mean(2, 4), Mean(6, 4), Mean()]).value == 1.0
    assert total([]).value is None


def test_only_finished_updates_count() -> None:
    assert [s.update for s in finished([rollout(0), rollout(1), rollout(2), train(0), train(1)])] == [0, 1]


def test_values_that_are_not_finite_survive_the_file(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(rollout(0))
    log.append(train(0, grad_norm=math.nan, all__kl_num=math.inf, all__kl_den=10.0))
    (signals,) = read_signals(tmp_path)
    assert signals.grad_norm == math.inf
    assert signals.kl.value == math.inf


def test_a_resumed_run_replaces_what_it_does_over(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for n in range(5):
        log.append(rollout(n, reward=0.1))
        log.append(train(n))
    for n in range(2, 4):
        log.append(rollout(n, reward=0.9))
        log.append(train(n))
    assert [(s.update, s.reward.value) for s in read_signals(tmp_path)] == [(0, 0.1), (1, 0.1), (2, 0.9), (3, 0.9)]


def test_evaluation_names_are_the_field_s(tmp_path: Path) -> None:
    line = EvalLine(update=-1, time=0.0, pass_1=0.25, pass_4=0.5)
    MetricsLog(tmp_path).append(line)
    assert b'"pass@1":0.25,"pass@4":0.5' in (tmp_path / "metrics.jsonl").read_bytes()
    assert MetricsLog(tmp_path).read() == [line]


def test_a_torn_last_line_is_not_read_and_the_next_writer_removes_it(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(rollout(0))
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + whole[: len(whole) // 2])
    assert len(log.read()) == 1
    log.append(rollout(1))
    assert [line.update for line in log.read()] == [0, 1]


def test_a_foreign_line_is_refused_by_number(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(rollout(0))
    with log.path.open("ab") as file:
        file.write(b'{"kind":"rollout","update":"three"}\n')
    with pytest.raises(RunLogError, match=r"metrics\.jsonl:2"):
        log.read()


def test_a_missing_log_is_an_empty_one(tmp_path: Path) -> None:
    assert MetricsLog(tmp_path).read() == []


def _write_many(run_dir: str, first: int) -> None:
    for n in range(first, first + 100):
        MetricsLog(run_dir).append(rollout(n))


def test_processes_write_whole_lines_side_by_side(tmp_path: Path) -> None:
    with ProcessPoolExecutor(3) as pool:
        list(pool.map(_write_many, [os.fspath(tmp_path)] * 3, [0, 1000, 2000]))
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert len(lines) == 300
    assert len(set(lines)) == 300
    MetricsLog(tmp_path).read()
