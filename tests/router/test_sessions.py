"""Pins: slots, dormancy, journal, Redis."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import engines
from running import fleet_of, play, running, settings, until

from miles_mixprec.config import Fleet
from miles_mixprec.errors import ConfigError
from miles_mixprec.router.failures import StoreAway
from miles_mixprec.router.redis_pins import RedisPins
from miles_mixprec.router.sessions import Journal, MemoryPins, Pin
from miles_mixprec.router.state import Engine, LiveFleet


def two_engines(pins: MemoryPins) -> list[Engine]:
    live = LiveFleet(Fleet(name="f", model="m", context_length=1), pins.active, time.monotonic)
    return [live.register(f"http://h:{i}", "p", "bf16", slots=2, version=0) for i in range(2)]


def test_a_slot_is_held_while_live_and_the_pin_until_idle() -> None:
    async def scene() -> None:
        pins = MemoryPins(active_s=10, idle_s=100, most=10)
        first, second = two_engines(pins)
        choice = [(first, 1), (second, 1)]
        a = await pins.claim("a", choice, 0.0)
        b = await pins.claim("b", choice, 0.0)
        assert a and b and (a.engine, b.engine) == ("p/0", "p/1")
        assert await pins.claim("c", choice, 0.0) is None
        assert await pins.claim("a", [(second, 1)], 0.0) is a
        pins.enter(b, 5.0)
        await pins.tick(11.0)
        assert pins.active == {"p/0": 0, "p/1": 1}  # b has a turn in flight
        c = await pins.claim("c", choice, 11.0)
        assert c and c.engine == "p/0"
        pins.enter(a, 12.0)  # a live session is never refused: the engine holds one more
        assert pins.active["p/0"] == 2
        pins.leave(a, 13.0)
        await pins.move(a, second)
        assert pins.active == {"p/0": 1, "p/1": 2}
        await pins.tick(110.0)
        assert set(pins.pins) == {"a", "b", "c"} and pins.live == {b}
        await pins.tick(112.0)
        assert set(pins.pins) == {"a", "b"}
        assert await pins.release("b") and not await pins.release("b")
        pins.leave(b, 115.0)
        assert not pins.live and pins.active["p/1"] == 0

    play(scene)


def test_most_pins_bounds_memory() -> None:
    async def scene() -> None:
        pins = MemoryPins(active_s=10, idle_s=100, most=3)
        first, _ = two_engines(pins)
        made = [await pins.claim(str(i), [(first, 100)], 0.0) for i in range(5)]
        assert [pin is not None for pin in made] == [True] * 3 + [False] * 2

    play(scene)


def test_journal_recovers_the_last_word_and_stays_small(tmp_path: Path) -> None:
    async def scene() -> None:
        path = tmp_path / "router.jsonl"
        pins = MemoryPins(10, 100, 10, Journal(path))
        await pins.open(0.0)
        first, second = two_engines(pins)
        a = await pins.claim("a", [(first, 2)], 0.0)
        assert a is not None
        await pins.claim("b", [(first, 2)], 0.0)
        await pins.claim("one-turn", [(second, 2)], 0.0, lasting=False)
        await pins.move(a, second)
        await pins.release("b")
        await pins.remember("view", "fp8", [7, "run", []])
        await pins.close()
        with path.open("ab") as torn:
            torn.write(b'["pin", "c", ["p"')
        again = MemoryPins(10, 100, 10, Journal(path))
        await again.open(5.0)
        assert {pin.key: (pin.pool, pin.view, pin.engine, pin.last) for pin in again.pins.values()} == {
            "a": ("p", "bf16", "p/1", 5.0)
        }
        assert again.facts["view"] == {"fp8": [7, "run", []]} and len(path.read_bytes().splitlines()) == 2
        path.write_bytes(b"{nonsense\n")
        with pytest.raises(ConfigError, match="line 1"):
            await MemoryPins(10, 100, 10, Journal(path)).open(0.0)

    play(scene)


def test_a_session_that_was_ended_in_mid_turn_stays_ended(tmp_path: Path) -> None:
    async def scene() -> None:
        path = tmp_path / "router.jsonl"
        pins = MemoryPins(10, 100, 10, Journal(path))
        first, second = two_engines(pins)
        pin = await pins.claim("a", [(first, 2)], 0.0)
        assert pin is not None
        pins.enter(pin, 0.0)
        await pins.release("a")
        await pins.move(pin, second)  # its engine failed
        await pins.close()
        again = MemoryPins(10, 100, 10, Journal(path))
        await again.open(5.0)
        assert not again.pins
        await again.close()

    play(scene)


def test_a_restarted_router_knows_sessions_views_engines_and_drains(tmp_path: Path) -> None:
    async def scene() -> None:
        config = settings(journal=str(tmp_path / "j"), gate_wait_s=0.2)
        fleet = fleet_of(a=("bf16", 2, 50), b=("fp8", 1, 50))
        async with engines(3, version=4) as fakes:
            async with running(config, fleet) as router:
                for fake, pool, view in zip(fakes, "aab", ("bf16", "bf16", "fp8"), strict=True):
                    await router.register(fake.url, pool, view, slots=50, weight_version=4)
                sources = {f"s{i}": (await router.turn(f"s{i}")).source for i in range(40)}
                await router.call("PUT", "/views/fp8", {"version": 5, "run": "r"})
                await router.call("POST", "/pools/a/drain")
            async with running(config, fleet) as router:
                for key, (pool, *_) in sources.items():
                    reply = await router.turn(key)
                    if pool == "a":
                        assert reply.source == sources[key]
                    else:  # version 5 is published; its engine still serves 4
                        assert reply.status == 409
                new = await router.turn("new")
                assert new.status == 409, "a is draining, so new sessions go to b"

    play(scene)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("needs redis-server (Debian: apt-get install redis-server)")
    socket = tmp_path_factory.mktemp("redis") / "s"
    server = subprocess.Popen(
        [binary, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(socket.parent)],
        stdout=subprocess.DEVNULL,
    )
    while not socket.exists():
        assert server.poll() is None
        time.sleep(0.02)
    yield f"unix://{socket}"
    server.terminate()
    server.wait()


def test_two_routers_share_pins_slots_views_and_engines(redis_url: str) -> None:
    async def scene() -> None:
        config = settings(redis_url=redis_url, gate_wait_s=0.3)
        fleet = fleet_of(a=("bf16", 1, 10), b=("fp8", 1, 10))
        async with engines(2) as fakes, running(config, fleet) as one, running(config, fleet) as two:
            await one.register(fakes[0].url, "a", "bf16", slots=10)
            await one.register(fakes[1].url, "b", "fp8", slots=10)
            await until(lambda: len(list(two.fleet.engines())) == 2)
            replies = await asyncio.gather(*((one, two)[i % 2].turn(f"s{i}", turn=str(i)) for i in range(20)))
            assert [reply.status for reply in replies] == [200] * 20
            assert (await one.turn("late")).status == (await two.turn("late")).status == 429
            for i, reply in enumerate(replies):
                other = await (two, one)[i % 2].turn(f"s{i}")
                assert other.source == reply.source
                session = await one.call("GET", f"/sessions/s{i}")
                assert len(session["turns"]) == 2 and session["pool"] == reply.source[0]
            await two.call("DELETE", "/sessions/s0")
            assert (await one.turn("late")).status == 200
            await one.call("PUT", "/views/fp8", {"version": 3, "run": "r"})
            await until(lambda: two.fleet.newest("fp8") == 3)
            await two.call("DELETE", "/workers/b-0")
            await until(lambda: len(list(one.fleet.engines())) == 1)

    play(scene)


def test_concurrent_first_turns_of_a_session_get_one_pin(redis_url: str) -> None:
    async def scene() -> None:
        config = settings(redis_url=redis_url)
        fleet = fleet_of(a=("bf16", 1, 100), b=("fp8", 1, 100))
        async with (
            engines(2) as fakes,
            running(config, fleet, run_id="x") as one,
            running(config, fleet, run_id="x") as two,
        ):
            for router in (one, two):
                await router.register(fakes[0].url, "a", "bf16", slots=100)
                await router.register(fakes[1].url, "b", "fp8", slots=100)
            for i in range(20):
                replies = await asyncio.gather(*(router.turn(f"k{i}") for router in (one, two, one, two)))
                assert len({reply.source for reply in replies}) == 1

    play(scene)


def test_sessions_of_a_lost_pool_leave_the_routers_memory(redis_url: str) -> None:
    async def scene() -> None:
        pins = RedisPins(redis_url, "lost", active_s=10, idle_s=100, most=3)
        first, _ = two_engines(pins)
        pin = await pins.claim("s", [(first, 2)], 0.0)
        assert pin is not None
        await pins.give_up(pin)
        await pins.tick(11.0)
        assert not pins.pins
        await pins.close()

    play(scene)


def test_a_shared_session_that_was_ended_in_mid_turn_holds_no_slot(redis_url: str) -> None:
    async def scene() -> None:
        pins = RedisPins(redis_url, "ended", active_s=10, idle_s=100, most=3)
        first, second = two_engines(pins)
        pin = await pins.claim("s", [(first, 2)], 0.0)
        assert pin is not None
        await pins.release("s")
        await pins.move(pin, second)
        await pins.record(pin, second.name, 0)
        assert not await pins.redis.keys("ended:*")
        await pins.close()

    play(scene)


def test_history_is_refused_while_redis_is_away() -> None:
    async def scene() -> None:
        pins = RedisPins("unix:///nonexistent/socket", "away", active_s=10, idle_s=100, most=3)
        with pytest.raises(StoreAway, match="retry"):
            await pins.turns(Pin("s", "p", "bf16", "p/0"))

    play(scene)


def test_a_router_refuses_to_start_without_its_redis() -> None:
    async def scene() -> None:
        with pytest.raises(ConfigError, match="redis_url"):
            async with running(settings(redis_url="unix:///nonexistent/socket")):
                pass

    play(scene)
