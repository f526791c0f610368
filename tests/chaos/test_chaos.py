"""What went wrong in real runs, on fake engines, under traffic. Run with -s to see the recovery times."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from running import Running, fleet_of, play, running, settings, until
from traffic import Traffic

from miles_mixprec.config import Router
from miles_mixprec.router import proxy, state, watch

VIEWS = {"a": "bf16", "b": "fp8"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same waits, shorter."""
    monkeypatch.setattr(proxy, "LOST_AFTER_S", 0.7)
    monkeypatch.setattr(watch, "TICK_S", 0.05)
    monkeypatch.setattr(watch, "CONTROL_S", 0.2)
    monkeypatch.setattr(state, "COOL_DOWN_S", (0.3, 2.0))


@asynccontextmanager
async def stage(
    *, engines: int = 2, clients: int = 16, router: Router | None = None, **traffic: float
) -> AsyncIterator[tuple[Running, dict[str, FakeEngine], Traffic]]:
    """Pools a and b with some engines each, and traffic that is under way."""
    fakes = {f"{pool}/{i}": FakeEngine(name=f"{pool}/{i}") for pool in VIEWS for i in range(engines)}
    fleet = fleet_of(**{pool: (view, engines, 40) for pool, view in VIEWS.items()})
    async with running(router or settings(), fleet) as live:
        for fake in fakes.values():
            await fake.start()
            await join(live, fake)
        play_on = Traffic(live, list(fakes.values()), **traffic).start(clients)  # type: ignore[arg-type]
        await until(lambda: play_on.done >= 2 * clients)
        try:
            yield live, fakes, play_on
        finally:
            play_on.stop = True
            for task in play_on.tasks:
                task.cancel()
            await asyncio.gather(*play_on.tasks, return_exceptions=True)
            for fake in fakes.values():
                await fake.stop()


async def join(live: Running, fake: FakeEngine, **fields: object) -> None:
    pool = fake.name.split("/")[0]
    await live.register(
        fake.url, pool, VIEWS[pool], engine=fake.name, slots=40, **{"weight_version": fake.version} | fields
    )


def tell(what: str, seconds: float) -> None:
    print(f"\n  {what}: {seconds:.2f} s")


async def flows(traffic: Traffic, turns: int = 60, limit_s: float = 15.0) -> float:
    """Seconds until that many more turns have been answered."""
    target = traffic.done + turns
    return await until(lambda: traffic.done >= target, limit_s)


def test_an_engine_dies() -> None:
    async def scene() -> None:
        async with stage() as (live, fakes, traffic):
            began = time.monotonic()
            await fakes["a/0"].stop()
            await until(lambda: open_(live, "a/0"))
            tell("breaker open after an engine's death", time.monotonic() - began)
            await flows(traffic)
            await traffic.finish()
            assert not traffic.retries, "the router sends turns again itself"

    play(scene)


def test_an_engine_hangs_with_turns_in_flight() -> None:
    async def scene() -> None:
        async with stage(turn_s=0.1) as (live, fakes, traffic):
            fakes["a/0"].mode = "hang"
            tell("turns taken back from a hung engine", await until(lambda: open_(live, "a/0")))
            await flows(traffic)
            fakes["a/0"].mode = "normal"
            tell("back in service", await until(lambda: not open_(live, "a/0") and engine(live, "a/0").returned > 0))
            await traffic.finish()
            assert not traffic.retries and traffic.slowest_s < 5

    play(scene)


def test_an_engine_forgets_its_turns_without_an_error() -> None:
    async def scene() -> None:
        async with stage() as (live, fakes, traffic):
            fakes["b/0"].mode = "forget"
            seconds = await until(lambda: engine(live, "b/0").lost > 0)
            tell("silent loss noticed", seconds)
            fakes["b/0"].mode = "normal"
            await flows(traffic)
            await traffic.finish()
            tell("slowest turn, of those that were lost", traffic.slowest_s)
            assert engine(live, "b/0").lost > 0 and not traffic.retries

    play(scene)


@pytest.mark.parametrize("mode", ["drop", "half", "trickle", "storm"])
def test_replies_that_break(mode: str) -> None:
    async def scene() -> None:
        async with stage() as (_, fakes, traffic):
            fakes["a/1"].mode = mode
            await flows(traffic, 150)
            fakes["a/1"].mode = "normal"
            tell(f"flow after {mode}", await flows(traffic))
            await traffic.finish()
            assert set(traffic.retries) <= {"engine_failed"}

    play(scene)


def test_large_replies_that_break_off_are_broken_off() -> None:
    async def scene() -> None:
        async with stage(clients=6, size=3 * 2**20, turns=2) as (live, fakes, traffic):
            fakes["a/1"].mode = "half"
            await until(lambda: live.proxy.hops.broken > 0)
            fakes["a/1"].mode = "normal"
            await flows(traffic, 10)
            await traffic.finish()
            assert traffic.retries["connection"] == live.proxy.hops.broken

    play(scene)


def test_a_storm_of_409_passes_through_and_opens_no_breaker() -> None:
    async def scene() -> None:
        async with stage(clients=0) as (live, fakes, _):
            for fake in fakes.values():
                fake.mode, fake.storm_status = "storm", 409
            replies = await asyncio.gather(*(live.turn(f"x{i}") for i in range(50)))
            assert {(reply.status, reply.body) for reply in replies} == {(409, b'{"error": "busy"}')}
            assert all(e.breaker == "closed" for e in live.fleet.engines())

    play(scene)


def test_a_pool_dies_and_comes_back() -> None:
    async def scene() -> None:
        async with stage(engines=1) as (live, fakes, traffic):
            began = time.monotonic()
            await fakes["a/0"].stop()
            await until(lambda: live.fleet.pools["a"].breaker == "open")
            tell("pool's breaker open", time.monotonic() - began)
            await until(lambda: traffic.retries.get("pool_unavailable", 0) > 0)
            since = len(traffic.sessions)
            await flows(traffic)
            assert traffic.served(since) == {"b"}, "new sessions go where engines are"
            refused = traffic.retries["pool_unavailable"]
            await flows(traffic)
            assert traffic.retries["pool_unavailable"] == refused, "nobody spins on a dead pool"
            await fakes["a/0"].start()
            await join(live, fakes["a/0"])  # at another address
            since = len(traffic.sessions)
            tell("pool back in service", await until(lambda: "a" in traffic.served(since)))
            await traffic.finish()

    play(scene)


def test_an_engine_comes_back_at_another_address() -> None:
    async def scene() -> None:
        async with stage() as (live, fakes, traffic):
            await fakes["b/1"].stop()
            await fakes["b/1"].start()
            await join(live, fakes["b/1"])
            before = engine(live, "b/1").returned
            tell("served from its new address", await until(lambda: engine(live, "b/1").returned > before))
            await traffic.finish()
            assert not traffic.retries

    play(scene)


def test_updates_roll_through_while_turns_wait() -> None:
    async def scene() -> None:
        async with stage(engines=2) as (live, fakes, traffic):
            for version in (1, 2, 3):
                for view in VIEWS.values():
                    await live.call("PUT", f"/views/{view}", {"version": version, "run": "r"})
                for fake in fakes.values():
                    await join(live, fake, state="updating", weight_version=version - 1)
                    await until(lambda fake=fake: fake.running == 0)
                    fake.version = version
                    await join(live, fake, state="serving")
                stale = [s for s in traffic.sessions if s.sources and s.sources[-1][2] > version]
                assert not stale
                await flows(traffic, 40)
            await traffic.finish()
            assert not traffic.retries and traffic.slowest_s < 2

    play(scene)


def test_an_engine_that_lies_about_its_version_serves_nobody() -> None:
    async def scene() -> None:
        async with stage() as (live, fakes, traffic):
            traffic.versions_change_in_mid_turn = True
            for fake in fakes.values():
                if fake.name != "a/0":
                    fake.version = 1
            for fake in fakes.values():
                await join(live, fake, weight_version=1)  # a/0 claims it too
            for view in VIEWS.values():
                await live.call("PUT", f"/views/{view}", {"version": 1, "run": "r"})
            await until(lambda: fakes["a/0"].running == 0)
            answered = len(fakes["a/0"].answered)
            await flows(traffic)
            assert len(fakes["a/0"].answered) == answered and engine(live, "a/0").version == 0
            await traffic.finish()

    play(scene)


def test_probes_that_fail_now_and_then_cost_nothing() -> None:
    async def scene() -> None:
        async with stage() as (live, fakes, traffic):
            for fake in fakes.values():
                fake.loads_status = 500
            fakes["a/0"].healthy = False
            await asyncio.sleep(0.15)
            fakes["a/0"].healthy = True
            await flows(traffic, 100)
            assert all(e.breaker == "closed" for e in live.fleet.engines())
            await traffic.finish()
            assert not traffic.retries

    play(scene)


def test_a_saturated_pool_gets_fewer_sessions() -> None:
    async def scene() -> None:
        async with stage(clients=60, think_s=0.02) as (live, fakes, traffic):
            pools = live.fleet.pools
            for name in ("a/0", "a/1"):
                fakes[name].kv_use, fakes[name].queued = 0.99, 30
            tell("share halved", await until(lambda: pools["a"].share < 0.3))
            for name in ("a/0", "a/1"):
                fakes[name].kv_use, fakes[name].queued = 0.1, 0
            tell("share restored", await until(lambda: pools["a"].share > 0.45, 20))
            await traffic.finish()

    play(scene)


def test_late_capacity_joins_and_ramps_in() -> None:
    async def scene() -> None:
        async with stage(engines=1) as (live, fakes, traffic):
            late = FakeEngine(name="a/7")
            traffic.fakes.append(late)
            fakes["a/7"] = await late.start()
            await join(live, late)
            assert live.fleet.limit(engine(live, "a/7")) < 40
            tell("first session on a late engine", await until(lambda: engine(live, "a/7").returned > 0))
            await traffic.finish()

    play(scene)


def test_the_router_is_preempted(tmp_path: Path) -> None:
    async def scene() -> None:
        config = settings(journal=str(tmp_path / "journal"))
        fakes = {name: await FakeEngine(name=name).start() for name in ("a/0", "b/0")}
        fleet = fleet_of(a=("bf16", 1, 99), b=("fp8", 1, 99))
        before: dict[str, tuple[str, str, int]] = {}
        async with running(config, fleet) as live:
            for fake in fakes.values():
                await join(live, fake)
            for i in range(60):
                before[f"s{i}"] = (await live.turn(f"s{i}")).source
        began = time.monotonic()
        async with running(config, fleet) as live:
            live.fleet.pools["a"].factor = 0.1  # weights are not what they were
            for key, source in before.items():
                assert (await live.turn(key)).source == source
            tell("60 sessions resumed by a new router", time.monotonic() - began)
        for fake in fakes.values():
            await fake.stop()

    play(scene)


def test_memory_stays_bounded_over_many_sessions() -> None:
    async def scene() -> None:
        async with stage(clients=40, turns=2, think_s=0.0, turn_s=0.0) as (live, _, traffic):
            await until(lambda: len(traffic.sessions) > 200)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            await until(lambda: len(traffic.sessions) > 700, 80)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            assert len(live.pins.pins) <= 40 and grown < 40, f"{grown:.0f} MB"
            await traffic.finish()

    play(scene, 110)


def engine(live: Running, name: str) -> state.Engine:
    return live.fleet.pools[name.split("/")[0]].engines[name]


def open_(live: Running, name: str) -> bool:
    return engine(live, name).breaker == "open"
