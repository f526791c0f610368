"""The benchmark against an engine whose capacity is known."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_mixprec.bench import Point, Ramp, Turn, bench, read_episodes, stop_reason, synthetic_episodes
from miles_mixprec.errors import ConfigError, EngineError
from miles_mixprec.planner.plan import anchor_of


class Engine:
    """Serves `capacity` turns at once, `turn_s` each; the others queue."""

    def __init__(self, capacity: int, turn_s: float, *, fail: bool = False) -> None:
        self.capacity, self.turn_s, self.fail = capacity, turn_s, fail
        self.bodies: list[dict[str, Any]] = []

    async def __aenter__(self) -> str:
        slots = asyncio.Semaphore(self.capacity)

        async def generate(request: web.Request) -> web.Response:
            body = await request.json()
            self.bodies.append(body)
            if self.fail:
                return web.Response(status=500)
            async with slots:
                await asyncio.sleep(self.turn_s)
            return web.json_response({"output_ids": [7] * body["sampling_params"]["max_new_tokens"]})

        async def info(request: web.Request) -> web.Response:
            return web.json_response({"version": "0.5.23", "kv_cache_dtype": "fp8_e4m3", "api_key": "secret"})

        app = web.Application()
        app.add_routes([web.post("/generate", generate), web.get("/server_info", info)])
        self.server = TestServer(app)
        await self.server.start_server()
        return str(self.server.make_url("/"))

    async def __aexit__(self, *error: object) -> None:
        await self.server.close()


EPISODES = [(Turn(30, 5), Turn(10, 7), Turn(10, 3)), (Turn(20, 4), Turn(10, 6))]


async def measure(engine: Engine, ramp: Ramp, **options: Any) -> Any:
    async with engine as url:
        return await bench(url, "p", EPISODES, ramp, max_context=200, token_range=(100, 200), seed=0, **options)


def test_finds_the_capacity_at_the_bound() -> None:
    """4 turns of 0.1 s at once: throughput saturates at 4 sessions, and 8 wait twice as long."""
    ramp = Ramp(levels=(2, 4, 8, 16, 32), warm_s=0.3, window_s=1.0, latency_s=0.25, max_lag_s=1.0)
    result = asyncio.run(measure(Engine(4, 0.1), ramp))
    by_level = {point.sessions: point for point in result.points}
    assert by_level[4].turns_per_hour > 1.5 * by_level[2].turns_per_hour
    assert by_level[8].p90_s > 1.5 * by_level[4].p90_s
    assert by_level[8].turns_per_hour < 1.4 * by_level[4].turns_per_hour
    assert result.stopped != "all levels measured"
    assert 4 <= anchor_of(json.loads(json.dumps(result, default=vars)), 0.25).slots <= 12
    assert result.engine == {"version": "0.5.23", "kv_cache_dtype": "fp8_e4m3"}


def test_replays_lengths_and_feeds_outputs_back() -> None:
    engine = Engine(100, 0.01)
    asyncio.run(measure(engine, Ramp(levels=(3,), warm_s=0.2, window_s=0.5, max_lag_s=10)))
    assert {body["sampling_params"]["max_new_tokens"] for body in engine.bodies} <= {3, 4, 5, 6, 7}
    assert all(body["sampling_params"]["ignore_eos"] and body["return_logprob"] for body in engine.bodies)
    following = [
        (a["input_ids"], b["input_ids"], a["sampling_params"]["max_new_tokens"])
        for a in engine.bodies
        for b in engine.bodies
        if len(b["input_ids"]) > len(a["input_ids"]) and b["input_ids"][: len(a["input_ids"])] == a["input_ids"]
    ]
    assert following, "later turns extend earlier ones"
    for before, after, generated in following:
        assert after[len(before) : len(before) + generated] == [7] * generated
    firsts = {tuple(body["input_ids"][:16]) for body in engine.bodies}
    assert len(firsts) > 3, "sessions share no prefix"
    assert max(len(body["input_ids"]) for body in engine.bodies) <= 200


def test_failing_engines_end_the_ramp() -> None:
    result = asyncio.run(
        measure(Engine(4, 0.0, fail=True), Ramp(levels=(2, 4), warm_s=0.1, window_s=0.3, max_lag_s=10))
    )
    assert len(result.points) == 1
    assert result.stopped == "100% of the requests failed"


def test_a_level_that_finishes_nothing_leaves_the_context_of_those_before() -> None:
    """With 0 tokens of context the planner would take the pool for one that holds no session."""
    ramp, engine = Ramp(levels=(2, 4), warm_s=0.5, window_s=0.5, max_lag_s=10), Engine(4, 0.01)
    result = asyncio.run(measure(engine, ramp, on_point=lambda point: setattr(engine, "fail", True)))
    assert [point.context > 0 for point in result.points] == [True, False]
    assert result.context == result.points[0].context


def test_unreachable_engine() -> None:
    with pytest.raises(EngineError, match="check the address"):
        asyncio.run(bench("http://127.0.0.1:1", "p", EPISODES, Ramp(), max_context=100))


def point(sessions: int, turns: float, p90: float = 1.0, errors: float = 0.0, lag: float = 0.0) -> Point:
    return Point(sessions, turns, 0.0, p90, p90, 100, errors, lag)


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([point(8, 100.0)], None),
        ([point(8, 100.0), point(16, 190.0)], None),
        ([point(8, 100.0), point(16, 102.0)], None),
        ([point(8, 100.0), point(16, 102.0), point(24, 104.0)], "two levels gained less than 3%"),
        ([point(8, 100.0), point(16, 102.0), point(24, 150.0)], None),
        ([point(8, 100.0, p90=20.5)], "p90 turn latency reached 20.5 s"),
        ([point(8, 100.0, p90=math.inf)], "p90 turn latency reached inf s"),
        ([point(8, 100.0, errors=0.06)], "6% of the requests failed"),
        ([point(8, 100.0, lag=0.2)], "the client itself was 0.20 s late; use a faster machine or more of them"),
    ],
)
def test_stopping_rules(points: list[Point], reason: str | None) -> None:
    assert stop_reason(points, Ramp()) == reason


def test_synthetic_episodes_have_the_asked_means_and_fit() -> None:
    episodes = synthetic_episodes(400, turns=40, first=1000, appended=200, generated=50, max_context=1 << 30, seed=1)
    turns = [len(episode) for episode in episodes]
    assert 34 < sum(turns) / len(turns) < 46
    generated = [turn.generated for episode in episodes for turn in episode]
    assert 47 < sum(generated) / len(generated) < 53
    short = synthetic_episodes(50, turns=40, first=100, appended=200, generated=50, max_context=2000)
    assert all(sum(t.appended + t.generated for t in episode) <= 2000 for episode in short if len(episode) > 1)
    assert short == synthetic_episodes(50, turns=40, first=100, appended=200, generated=50, max_context=2000)


def test_recorded_episodes(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text('{"turns": [[100, 5], [20, 7]]}\n{"turns": [[50, 1]]}\n')
    assert read_episodes(path) == [(Turn(100, 5), Turn(20, 7)), (Turn(50, 1),)]
    path.write_text('{"turns": [[100, 5]]}\n{"turns": [[100]]}\n')
    with pytest.raises(ConfigError, match=r"episodes\.jsonl:2: not an episode"):
        read_episodes(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="has no episodes"):
        read_episodes(path)
