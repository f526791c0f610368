"""Closed-loop replay of agent episodes against one engine: how many sessions it serves at a turn-latency bound.

Every session replays the lengths of an episode: prompts and observations of random tokens, completions of the
recorded length (`ignore_eos`), the engine's own output fed back, so the context grows as it would. Prompts are token
ids; each session starts with a prefix of its own, at a random turn, so that neither false prefix sharing nor a
common phase flatters the engine. Levels of concurrency rise until a stopping rule ends the ramp.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp

from miles_mixprec.errors import ConfigError, EngineError

PREFIX_TOKENS = 16
LAG_PROBE_S = 0.05


@dataclass(frozen=True)
class Turn:
    """Tokens that the environment appends before the turn, and tokens that the engine generates in it."""

    appended: int
    generated: int


Episode = tuple[Turn, ...]


@dataclass(frozen=True)
class Ramp:
    """Levels of concurrency, how long each is warmed and measured (s), and when to stop."""

    levels: Sequence[int] = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    warm_s: float = 120.0
    window_s: float = 180.0
    latency_s: float = 10.0  # the p90 bound of a turn
    stop_latency: float = 2.0  # times the bound
    min_gain: float = 0.03  # of turns per hour; two levels below it stop the ramp
    max_errors: float = 0.05
    max_lag_s: float = 0.1  # p90 by which this client is late itself: beyond, it measures the client


@dataclass(frozen=True)
class Point:
    """What one level gave. Latencies in seconds; `context` is the mean prompt length in tokens."""

    sessions: int
    turns_per_hour: float
    tokens_per_s: float
    p50_s: float
    p90_s: float
    context: int
    errors: float
    lag_p90_s: float


@dataclass(frozen=True)
class Result:
    """One pool's curve, as `planner.plan.anchor_of` reads it. `context` is the last level's that finished turns."""

    pool: str
    context: int
    latency_s: float
    stopped: str
    points: list[Point]
    engine: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def synthetic_episodes(
    count: int = 64,
    *,
    turns: int = 88,
    first: int = 4000,
    appended: int = 600,
    generated: int = 77,
    max_context: int = 131072,
    seed: int = 0,
) -> list[Episode]:
    """Episodes with geometric turn counts and exponential lengths around the given means, within `max_context`."""
    rng = random.Random(seed)
    episodes = []
    for _ in range(count):
        episode: list[Turn] = []
        context = 0
        for _ in range(1 + int(rng.expovariate(1 / max(turns - 1, 1e-9)))):
            mean = appended if episode else first
            turn = Turn(1 + int(rng.expovariate(1 / mean)), 1 + int(rng.expovariate(1 / generated)))
            context += turn.appended + turn.generated
            if context > max_context and episode:
                break
            episode.append(turn)
        episodes.append(tuple(episode))
    return episodes


def read_episodes(path: Path) -> list[Episode]:
    """Recorded episodes: JSON lines `{"turns": [[appended, generated], ...]}`. Raises ConfigError, naming the line."""
    episodes = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            episodes.append(tuple(Turn(int(a), int(g)) for a, g in json.loads(line)["turns"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f'{path}:{number}: not an episode {{"turns": [[appended, generated], ...]}}') from error
    if not episodes or not all(episodes):
        raise ConfigError(f"{path}: has no episodes, or one without turns; record at least one turn each")
    return episodes


async def bench(
    url: str,
    pool: str,
    episodes: Sequence[Episode],
    ramp: Ramp,
    *,
    max_context: int,
    token_range: tuple[int, int] = (1000, 20000),
    seed: int | None = None,
    on_point: Callable[[Point], None] = lambda point: None,
) -> Result:
    """Ramp sessions on the engine at `url` and return its curve. Raises EngineError if it cannot be reached."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        engine = await _describe(http, url)
        load = _Load(http, episodes, max_context, token_range, random.Random(seed))
        points: list[Point] = []
        stopped = "all levels measured"
        try:
            for level in ramp.levels:
                points.append(await load.measure(level, ramp))
                on_point(points[-1])
                if reason := stop_reason(points, ramp):
                    stopped = reason
                    break
        finally:
            await load.stop()
    context = next((point.context for point in reversed(points) if point.context), 0)
    return Result(pool, context, ramp.latency_s, stopped, points, engine)


def stop_reason(points: Sequence[Point], ramp: Ramp) -> str | None:
    """Why the ramp ends after these points, or None."""
    last = points[-1]
    if last.errors > ramp.max_errors:
        return f"{last.errors:.0%} of the requests failed"
    if last.lag_p90_s > ramp.max_lag_s:
        return f"the client itself was {last.lag_p90_s:.2f} s late; use a faster machine or more of them"
    if last.p90_s > ramp.stop_latency * ramp.latency_s:
        return f"p90 turn latency reached {last.p90_s:.1f} s"
    gains = [b.turns_per_hour / max(a.turns_per_hour, 1e-9) - 1 for a, b in itertools.pairwise(points)]
    if len(gains) >= 2 and max(gains[-2:]) < ramp.min_gain:
        return f"two levels gained less than {ramp.min_gain:.0%}"
    return None


@dataclass
class _Window:
    """What finished while one level was measured."""

    latencies: list[float] = field(default_factory=list)  # seconds of each turn
    contexts: list[int] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)  # seconds that this client was late
    tokens: int = 0
    errors: int = 0


@dataclass
class _Load:
    """Sessions that keep replaying episodes, and a record of the turns they finished."""

    http: aiohttp.ClientSession
    episodes: Sequence[Episode]
    max_context: int
    token_range: tuple[int, int]
    rng: random.Random
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    in_flight: dict[int, float] = field(default_factory=dict)  # session -> start of its turn
    seen: _Window = field(default_factory=_Window)

    async def measure(self, sessions: int, ramp: Ramp) -> Point:
        while len(self.tasks) < sessions + 1:  # the first one probes this client's own lag
            run = self._session(len(self.tasks)) if self.tasks else self._probe_lag()
            self.tasks.append(asyncio.create_task(run))
        await asyncio.sleep(ramp.warm_s)
        self.seen = seen = _Window()
        started = time.monotonic()
        await asyncio.sleep(ramp.window_s)
        now = time.monotonic()
        turns = len(seen.latencies)
        # Turns that run on count with their age once it exceeds the bound: a stuck engine must not look fast.
        latencies = seen.latencies + [age for at in self.in_flight.values() if (age := now - at) > ramp.latency_s]
        return Point(
            sessions=sessions,
            turns_per_hour=turns / (now - started) * 3600,
            tokens_per_s=seen.tokens / (now - started),
            p50_s=_quantile(latencies, 0.5),
            p90_s=_quantile(latencies, 0.9),
            context=round(fmean(seen.contexts)) if turns else 0,
            errors=seen.errors / max(turns + seen.errors, 1),
            lag_p90_s=_quantile(seen.lags, 0.9),
        )

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self.tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _session(self, number: int) -> None:
        for played in itertools.count():
            episode = self.rng.choice(self.episodes)
            start = 0 if played else self.rng.randrange(len(episode))
            context = self._random_tokens(PREFIX_TOKENS)
            context += self._random_tokens(sum(turn.appended + turn.generated for turn in episode[:start]))
            for turn in episode[start:]:
                context += self._random_tokens(turn.appended)
                if len(context) + turn.generated > self.max_context:
                    break
                output = await self._turn(number, context, turn.generated)
                if output is None:
                    break
                context += output

    async def _turn(self, number: int, context: list[int], generated: int) -> list[int] | None:
        body = {
            "input_ids": context,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": generated, "ignore_eos": True},
            "return_logprob": True,
        }
        self.in_flight[number] = started = time.monotonic()
        try:
            async with self.http.post("/generate", json=body, raise_for_status=True) as reply:
                output = (await reply.json())["output_ids"]
        except (aiohttp.ClientError, KeyError):
            self.seen.errors += 1
            await asyncio.sleep(0.1)
            return None
        finally:
            del self.in_flight[number]
        self.seen.latencies.append(time.monotonic() - started)
        self.seen.contexts.append(len(context))
        self.seen.tokens += len(output)
        return list(output)

    async def _probe_lag(self) -> None:
        while True:
            due = time.monotonic() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            self.seen.lags.append(time.monotonic() - due)

    def _random_tokens(self, count: int) -> list[int]:
        return self.rng.choices(range(*self.token_range), k=count)


async def _describe(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    keys = (
        "version", "model_path", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "moe_runner_backend",
        "linear_attn_backend", "tp_size", "max_running_requests",
    )  # fmt: skip
    try:
        async with http.get("/server_info", raise_for_status=True) as reply:
            info = await reply.json()
    except aiohttp.ClientError as error:
        raise EngineError(f"engine {url}: {error}; check the address and that it serves") from error
    return {key: info[key] for key in keys if key in info}


def _quantile(values: Sequence[float], q: float) -> float:
    """Nearest-rank quantile; infinite when there are no values, since nothing finished."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("inf")
