"""Versions: policies, rewinds, engines at work on an update."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import engines
from hypothesis import given
from hypothesis import strategies as st
from running import KEY, Running, play, running, settings, until

from miles_mixprec.router import gate


@pytest.mark.parametrize(
    ("policy", "lag", "newest", "asked", "floor"),
    [
        ("newest", 0, 7, 0, 7),
        ("newest", 3, 7, 9, 9),
        ("bounded", 2, 7, 0, 5),
        ("bounded", 2, 7, 6, 6),
        ("min", 0, 7, 4, 4),
        ("min", 0, 7, 0, 0),
        ("any", 0, 7, 9, 0),
    ],
)
def test_floor(policy: str, lag: int, newest: int, asked: int, floor: int) -> None:
    assert gate.floor(policy, lag, newest, asked) == floor


@given(st.one_of(st.text(), st.integers(0, 2**53), st.none(), st.booleans(), st.lists(st.integers())))
def test_parse_takes_numbers_only(value: object) -> None:
    found = gate.parse(value)
    assert found is None or (isinstance(found, int) and str(found) == str(value).lstrip("0").rjust(1, "0"))


def test_the_lower_of_claim_and_answer_counts() -> None:
    assert gate.effective(None, None) == 0
    assert gate.effective(4, None) == gate.effective(None, 4) == 4
    assert gate.effective(4, 3) == gate.effective(3, 4) == 3


async def publish(router: Running, version: int, run: str = "r", view: str = "bf16", status: int = 200) -> None:
    await router.call("PUT", f"/views/{view}", {"version": version, "run": run}, status=status)


def test_a_turn_waits_for_the_update_and_is_told_the_versions_if_it_does_not_come() -> None:
    async def scene() -> None:
        async with engines(1, version=1) as (fake,), running(settings(gate_wait_s=0.5)) as router:
            await router.register(fake.url, "p", slots=4, weight_version=1)
            assert (await router.turn("s")).source == ("p", "p/0", 1)
            await publish(router, 2)
            waiting = asyncio.ensure_future(router.turn("s"))
            await asyncio.sleep(0.1)
            await router.register(fake.url, "p", state="updating")
            fake.version = 2
            await router.register(fake.url, "p", state="serving", weight_version=2)
            assert (await waiting).source == ("p", "p/0", 2)
            await publish(router, 3)
            refused = await router.turn("s")
            assert refused.status == 409 and b'"required": 3' in refused.body and b'"p/0": 2' in refused.body

    play(scene)


def test_a_version_announced_late_or_twice_changes_nothing_and_a_former_run_never_returns() -> None:
    async def scene() -> None:
        async with running() as router:
            await publish(router, 5)
            await publish(router, 4)
            assert router.fleet.newest("bf16") == 5
            await publish(router, 2, run="r#2")
            assert router.fleet.newest("bf16") == 2
            await publish(router, 6, run="r", status=409)
            assert router.fleet.newest("bf16") == 2

    play(scene)


def test_after_a_rewind_engines_with_leftover_weights_serve_nobody_until_they_reload() -> None:
    async def scene() -> None:
        async with engines(1, version=9) as (fake,), running(settings(gate_wait_s=0.2)) as router:
            await router.register(fake.url, "p", slots=4, weight_version=9)
            await publish(router, 9, run="r#1")
            assert (await router.turn("s")).status == 200
            await publish(router, 7, run="r#2")
            await router.register(fake.url, "p", state="serving", weight_version=9)  # its sidecar's heartbeat
            assert (await router.turn("s")).status == 409, "9 of the former run is not 9 of this one"
            await router.register(fake.url, "p", state="updating")
            fake.version = 7
            await router.register(fake.url, "p", state="serving", weight_version=7)
            assert (await router.turn("s")).source[2] == 7

    play(scene)


def test_a_session_stays_with_its_engine_through_an_update_but_not_for_ever() -> None:
    async def scene() -> None:
        async with engines(2) as fakes, running(settings(gate_wait_s=1.0)) as router:
            for fake in fakes:
                await router.register(fake.url, "p", slots=4, weight_version=0)
            home = (await router.turn("s")).source[1]
            fake = fakes[int(home[-1])]
            await router.register(fake.url, "p", engine=home, state="updating")
            waiting = asyncio.ensure_future(router.turn("s"))
            await asyncio.sleep(0.2)
            await router.register(fake.url, "p", engine=home, state="serving")
            assert (await waiting).source[1] == home
            await router.register(fake.url, "p", engine=home, state="updating")
            assert (await router.turn("s")).source[1] != home, "after half of gate_wait_s another engine takes over"

    play(scene)


def test_an_updating_engine_that_does_not_answer_is_not_dead() -> None:
    async def scene() -> None:
        async with engines(1) as (fake,), running() as router:
            await router.register(fake.url, "p", slots=4)
            await router.register(fake.url, "p", state="updating")
            fake.mode = "hang"
            await asyncio.sleep(1.0)
            assert router.fleet.pools["p"].breaker == "closed"
            await router.register(fake.url, "p", state="serving")
            await until(lambda: router.fleet.pools["p"].breaker == "open")

    play(scene)


def test_a_request_may_ask_for_more() -> None:
    async def scene() -> None:
        async with engines(1, version=3) as (fake,), running(settings(gate="min", gate_wait_s=0.1)) as router:
            await router.register(fake.url, "p", slots=4)
            await until(lambda: next(router.fleet.engines()).version == 3)
            for asked, status in ((3, 200), (4, 409)):
                headers = {KEY: "s", "X-Mixprec-Min-Version": str(asked)}
                async with router.http.post(router.url + "/generate", json={}, headers=headers) as reply:
                    assert reply.status == status
            assert "X-Mixprec-Min-Version" not in fake.headers[0]

    play(scene)


def test_draining_pools_and_engines_take_no_new_sessions() -> None:
    async def scene() -> None:
        async with engines(3) as fakes, running() as router:
            await router.register(fakes[0].url, "a", slots=50)
            await router.register(fakes[1].url, "b", slots=50)
            await router.register(fakes[2].url, "b", slots=50)
            old = {f"s{i}": (await router.turn(f"s{i}")).source for i in range(12)}
            await router.call("POST", "/pools/a/drain")
            assert {(await router.turn(f"n{i}")).source[0] for i in range(4)} == {"b"}
            for key, source in old.items():
                assert (await router.turn(key)).source == source
            await router.register(fakes[1].url, "b", engine="b/0", state="draining")
            for key, source in old.items():
                assert (await router.turn(key)).source[1] == ("b/1" if source[0] == "b" else "a/0")
            await router.call("POST", "/pools/b/drain")
            assert (await router.turn("late")).status == 503
            await router.call("POST", "/pools/a/undrain")
            assert (await router.turn("late")).source[0] == "a"
            await router.call("POST", "/pools/c/drain", status=404)

    play(scene)
