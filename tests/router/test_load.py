"""2,000 concurrent multi-turn sessions while pools are added, removed and resized."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

from fake_engine import FakeEngine
from running import KEY, Running, play, running, settings, until

CONCURRENT, TURNS = 2000, 3


async def episode(router: Running, number: int, seen: dict[str, str], lost: set[str]) -> None:
    key = f"s{number}"
    await turns_of(router, key, seen, lost)
    async with router.http.delete(f"{router.url}/sessions/{key}"):
        pass


async def turns_of(router: Running, key: str, seen: dict[str, str], lost: set[str]) -> None:
    for turn in range(TURNS):
        while True:
            async with router.http.post(
                router.url + "/generate", json={"turn": f"{key}.{turn}", "sleep": 0.05}, headers={KEY: key}
            ) as reply:
                body = await reply.read()
            if reply.status == 200:
                break
            kind = json.loads(body)["error"]["type"]
            if kind == "pool_unavailable":
                lost.add(key)
                return
            assert kind in ("no_free_slot", "no_pool"), body
            await asyncio.sleep(float(reply.headers["Retry-After"]))
        assert json.loads(body)["meta_info"]["turn"] == f"{key}.{turn}"
        pool = reply.headers["X-Mixprec-Pool"]
        assert seen.setdefault(key, pool) == pool, "a session changed its pool"


def test_two_thousand_sessions_while_the_fleet_changes() -> None:
    async def scene() -> None:
        fakes = [await FakeEngine().start() for _ in range(8)]
        async with running(settings(poll_s=1.0)) as router:

            async def join(number: int, pool: str, view: str, slots: int) -> None:
                await router.register(fakes[number].url, pool, view, slots=slots)

            for number in range(4):
                await join(number, "ab"[number // 2], ("bf16", "fp8")[number // 2], 400)
            seen: dict[str, str] = {}
            lost: set[str] = set()
            tasks = [asyncio.ensure_future(episode(router, i, seen, lost)) for i in range(CONCURRENT)]
            hops = router.proxy.hops
            await until(lambda: hops.answered > 500, 30)
            for number in (4, 5):  # a pool joins
                await join(number, "c", "nvfp4", 400)
            for number in (0, 1):  # one grows
                await join(number, "a", "bf16", 600)
            await until(lambda: hops.answered > 1500, 30)
            for number in (2, 3):  # one goes away
                await router.call("POST", f"/remove_worker?url={fakes[number].url}")
            await asyncio.gather(*tasks)
            counts = Counter(seen.values())
            assert len(seen) + len(lost - seen.keys()) == CONCURRENT
            assert all(seen[key] == "b" for key in lost & seen.keys()), "only the pool that went away lost sessions"
            assert counts["c"] > 0 and counts["a"] > counts["c"]
            assert hops.received == hops.answered + sum(hops.refused.values())
            answered = sum(len(fake.answered) for fake in fakes)
            assert answered == hops.answered == len({turn for fake in fakes for turn in fake.answered})
            print("\n  sessions per pool", dict(counts), "lost with their pool", len(lost), "refusals", hops.refused)
        for fake in fakes:
            await fake.stop()

    play(scene, 100)
