"""What Miles' log hooks write into the run log."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np

from miles_mixprec.config import from_args
from miles_mixprec.guard.signals import EvalLine, MetricsLog, PoolRollout, RolloutLine, TrainLine
from miles_mixprec.rollout.generate import RECORD
from miles_mixprec.rollout.record import SamplerRecord


def log_rollout(rollout_id: int, args: Namespace, samples: list[Any], extra_metrics: Any, rollout_time: float) -> bool:
    """Miles' `--custom-rollout-log-function-path`: one rollout line; Miles' own logging goes on (returns False)."""
    config = from_args(args)
    by_pool: dict[str, list[Any]] = {name: [] for name in config.fleet.pools}
    for sample in samples:
        by_pool[_record(sample).pool].append(sample)
    dropped = {key.rpartition("/")[2]: int(n) for key, n in (extra_metrics or {}).items() if "dropped_groups" in key}
    MetricsLog(config.run_dir).append(
        RolloutLine(
            update=rollout_id,
            time=time.time(),
            reward=_mean([sample.reward for sample in samples]),
            samples=len(samples),
            format_errors=sum(_note(sample, "ended_on_format_error") for sample in samples),
            length_capped=sum(_note(sample, "length_capped") for sample in samples),
            response_tokens=_mean([sample.response_length for sample in samples]),
            per_pool={
                pool: _pool_line(members, rollout_id, dropped.get(pool, 0))
                for pool, members in by_pool.items()
                if members or dropped.get(pool)
            },
        )
    )
    return False


def log_eval(rollout_id: int, args: Namespace, data: dict[str, dict[str, Any]], extra_metrics: Any) -> bool:
    """Miles' `--custom-eval-rollout-log-function-path`: pass@1 and pass@4 of every evaluated episode, as one line.

    The line belongs to the update whose weights the engines really served, the oldest if they changed on the way.
    Miles' own logging goes on (returns False).
    """
    config = from_args(args)
    by_prompt: dict[tuple[str, str], list[float]] = {}
    for name, dataset in data.items():
        for sample in dataset["samples"]:
            by_prompt.setdefault((name, str(sample.prompt)), []).append(float(sample.reward))
    versions = [int(v) for dataset in data.values() for sample in dataset["samples"] for v in sample.weight_versions]
    MetricsLog(config.run_dir).append(
        EvalLine(
            update=min(versions) - 1,
            time=time.time(),
            pass_1=_mean([pass_at(1, rewards) for rewards in by_prompt.values()]),
            pass_4=_mean([pass_at(4, rewards) for rewards in by_prompt.values()]),
            episodes=sum(map(len, by_prompt.values())),
        )
    )
    return False


def pass_at(k: int, rewards: Sequence[float]) -> float:
    """Unbiased estimate of P(at least one of k episodes passes) from n >= k of them (arXiv 2107.03374, eq. 1).

    With fewer than k episodes it is that of as many as there are.
    """
    n, passed = len(rewards), sum(reward > 0 for reward in rewards)
    k = min(k, n)
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def _pool_line(samples: list[Any], update: int, dropped: int) -> PoolRollout:
    records = [_record(sample) for sample in samples]
    sampled = [record.weight_versions[record.weight_versions >= 0] for record in records]
    every = np.concatenate([np.zeros(0, np.int32), *sampled])
    return PoolRollout(
        samples=len(samples),
        tokens=every.size,
        reward=_mean([sample.reward for sample in samples]),
        turns=sum(len(record.engines) for record in records),
        aborted=dropped,
        format_errors=sum(_note(sample, "ended_on_format_error") for sample in samples),
        staleness=_mean([update - versions.mean() for versions in sampled]),
        versions=(int(every.min()), int(every.max())) if every.size else (-1, -1),
    )


def _record(sample: Any) -> SamplerRecord:
    return vars(sample)[RECORD]


def _note(sample: Any, key: str) -> int:
    return int(sample.metadata["mixprec"][key])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


class TrainLog:
    """One of Miles' tracking backends: takes what the trainer logs and writes one train line per update."""

    def init(self, args: Namespace, **_: Any) -> None:
        self.lines, self.last = MetricsLog(from_args(args).run_dir), time.time()

    def log(self, metrics: dict[str, Any], *_: Any, **__: Any) -> None:
        if "train/step" not in metrics:
            return
        now = time.time()
        self.lines.append(
            TrainLine(
                update=int(metrics["train/step"]),
                time=now,
                seconds=now - self.last,
                grad_norm=_finite(metrics.get("train/grad_norm")),
                metrics={
                    key.removeprefix("train/"): _finite(value)
                    for key, value in metrics.items()
                    if key.startswith("train/mixprec/")
                },
            )
        )
        self.last = now

    def finish(self) -> None: ...

    def define_step_key_metric_group(self, *_: Any, **__: Any) -> None: ...


def _finite(value: Any) -> float | None:
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None
