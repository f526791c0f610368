"""The run log `<run_dir>/metrics.jsonl` and what it says about each update.

Rollout manager, trainer and evaluation append lines of three kinds. Loss metrics arrive as sums, numerator and
denominator, so that a mean over any set of ranks, pools or updates is the mean over its tokens.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from miles_mixprec.config import Config, from_file
from miles_mixprec.errors import MixprecError

METRICS = "metrics.jsonl"
CONFIG = "config.yaml"  # the run's resolved configuration


class RunLogError(MixprecError):
    """A run log that is missing or holds a line that no version of this package wrote."""


class PoolRollout(msgspec.Struct, kw_only=True):
    """What one pool contributed to the batch of an update."""

    samples: int
    tokens: int  # response tokens the pool sampled
    reward: float  # mean over the samples
    turns: int
    aborted: int = 0  # episodes that ended without a sample
    format_errors: int = 0  # samples that ended on repeated format errors
    staleness: float = 0.0  # mean over the samples: trainer version - served version
    versions: tuple[int, int]  # oldest and newest weight version sampled from


class RolloutLine(msgspec.Struct, kw_only=True, tag_field="kind", tag="rollout"):
    """The batch that update `update` trains on."""

    update: int
    time: float  # unix seconds
    reward: float
    samples: int
    format_errors: int
    length_capped: int  # samples with a turn, or an episode, at its maximum length
    response_tokens: float  # mean per sample
    per_pool: dict[str, PoolRollout]


class TrainLine(msgspec.Struct, kw_only=True, tag_field="kind", tag="train"):
    """The finished update. A value that was not finite is written as null."""

    update: int
    time: float
    seconds: float  # wall-clock from the end of the previous update to the end of this one
    grad_norm: float | None
    metrics: dict[str, float | None]  # mixprec/<group>/<metric>_<num | den>, as in `miles_mixprec.loss.metrics`


class EvalLine(msgspec.Struct, kw_only=True, tag_field="kind", tag="eval"):
    """Held-out evaluation of the weights after update `update`; update -1 is the model the run started from."""

    update: int
    time: float
    pass_1: float = msgspec.field(name="pass@1")
    pass_4: float = msgspec.field(name="pass@4")
    episodes: int = 0


Line = RolloutLine | TrainLine | EvalLine
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class MetricsLog:
    """Append-only JSON lines that several processes write and anyone may follow."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.path = Path(run_dir) / METRICS

    def append(self, line: Line) -> None:
        """Write `line` whole: one write under a file lock, after cutting off what a killed writer left unfinished."""
        data = msgspec.json.encode(line) + b"\n"
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                os.ftruncate(fd, os.pread(fd, size, 0).rfind(b"\n") + 1)
            os.write(fd, data)
        finally:
            os.close(fd)

    def read(self) -> list[Line]:
        """The lines that stand: an unfinished last line is left out, and so is what a resumed run did over.

        A run that resumes from the checkpoint of update n writes update n+1 again. Such a line replaces every earlier
        line of its kind from that update on, because they describe weights that were thrown away.
        Raises RunLogError for a line that is not of the log's format.
        """
        kept: dict[type[Line], list[Line]] = {RolloutLine: [], TrainLine: [], EvalLine: []}
        text = self.path.read_bytes() if self.path.exists() else b""
        for number, raw in enumerate(text.split(b"\n")[:-1], start=1):
            try:
                line = _decoder.decode(raw)
            except msgspec.MsgspecError as error:
                raise RunLogError(f"{self.path}:{number}: not a line of the run log ({error}); remove it") from error
            same_kind = kept[type(line)]
            while same_kind and same_kind[-1].update >= line.update:
                same_kind.pop()
            same_kind.append(line)
        return [line for lines in kept.values() for line in lines]


@dataclass(frozen=True)
class Mean:
    """A mean kept as its sums, so that means over parts add up to the mean over the whole."""

    num: float = 0.0
    den: float = 0.0

    @property
    def value(self) -> float | None:
        """None when nothing was counted."""
        return self.num / self.den if self.den else None

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.num + other.num, self.den + other.den)


NOTHING = Mean()


def total(means: Iterable[Mean]) -> Mean:
    return sum(means, NOTHING)


@dataclass(frozen=True)
class PoolSignals:
    """One pool in one update."""

    share: Mean  # of the update's samples
    tokens: int
    turns: int
    reward: Mean
    format_errors: Mean
    aborted: Mean
    staleness: Mean
    versions: tuple[int, int]
    kl: Mean  # sampler-trainer KL, nats per token
    masked: Mean  # share of tokens whose weight was out of bounds


@dataclass(frozen=True)
class Signals:
    """One update. Shares and means are over samples, or tokens where the loss computed them."""

    update: int
    reward: Mean = NOTHING
    format_errors: Mean = NOTHING
    length_capped: Mean = NOTHING
    response_tokens: Mean = NOTHING
    staleness: Mean = NOTHING
    kl: Mean = NOTHING
    tail_ratio: Mean = NOTHING  # sampler's mass off the recorded head / trainer's
    mass_ratio: Mean = NOTHING  # sampler's mass on the recorded head or support / trainer's
    masked: Mean = NOTHING
    entropy: Mean = NOTHING
    rejected: Mean = NOTHING  # share of samples that failed a contract
    grad_norm: float | None = None  # inf when it was not finite
    seconds: float = 0.0
    time: float = 0.0
    pools: dict[str, PoolSignals] = field(default_factory=dict)
    kl_by_lag: dict[str, Mean] = field(default_factory=dict)  # by range of staleness


def signals_of(rollout: RolloutLine, train: TrainLine) -> Signals:
    """The signals of the update that trained on `rollout`."""

    def share(count: float) -> Mean:
        return Mean(count, rollout.samples)

    def loss(group: str, name: str) -> Mean:
        return Mean(*(_sum(train, f"{group}/{name}_{part}") for part in ("num", "den")))

    def pool(name: str, part: PoolRollout) -> PoolSignals:
        return PoolSignals(
            share=share(part.samples),
            tokens=part.tokens,
            turns=part.turns,
            reward=Mean(part.reward * part.samples, part.samples),
            format_errors=Mean(part.format_errors, part.samples),
            aborted=Mean(part.aborted, part.samples + part.aborted),
            staleness=Mean(part.staleness * part.samples, part.samples),
            versions=part.versions,
            kl=loss(f"pool/{name}", "kl"),
            masked=loss(f"pool/{name}", "masked"),
        )

    pools = {name: pool(name, part) for name, part in rollout.per_pool.items()}
    lags = {key.split("/")[2] for key in train.metrics if key.startswith("mixprec/lag/")}
    return Signals(
        update=train.update,
        reward=share(rollout.reward * rollout.samples),
        format_errors=share(rollout.format_errors),
        length_capped=share(rollout.length_capped),
        response_tokens=share(rollout.response_tokens * rollout.samples),
        staleness=total(part.staleness for part in pools.values()),
        **{name: loss("all", name) for name in ("kl", "tail_ratio", "masked", "entropy", "rejected")},
        mass_ratio=Mean(_sum(train, "all/sampler_mass_num"), _sum(train, "all/trainer_mass_num")),
        grad_norm=math.inf if train.grad_norm is None else train.grad_norm,
        seconds=train.seconds,
        time=train.time,
        pools=pools,
        kl_by_lag={lag: loss(f"lag/{lag}", "kl") for lag in lags},
    )


def finished(lines: Iterable[Line]) -> list[Signals]:
    """The signals of every update whose rollout and training are both logged, in order."""
    known = list(lines)
    rollouts = {line.update: line for line in known if isinstance(line, RolloutLine)}
    trains = {line.update: line for line in known if isinstance(line, TrainLine)}
    return [signals_of(rollouts[n], trains[n]) for n in sorted(rollouts.keys() & trains.keys())]


def read_config(run_dir: str | os.PathLike[str]) -> Config:
    """The configuration of the run in `run_dir`. Raises RunLogError when there is none, ConfigError for a bad one."""
    path = Path(run_dir) / CONFIG
    if not path.exists():
        raise RunLogError(f"{path} is missing: name the folder of a run, as in run_dir=...")
    return from_file(path)


def read_signals(run_dir: str | os.PathLike[str]) -> list[Signals]:
    """`finished` of the log in `run_dir`. Raises RunLogError."""
    return finished(MetricsLog(run_dir).read())


def _sum(train: TrainLine, key: str) -> float:
    value = train.metrics.get(f"mixprec/{key}", 0.0)
    return math.inf if value is None else value
