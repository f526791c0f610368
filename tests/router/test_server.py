"""The router as clients see it: registration, turns, attribution, byte transparency."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_engine import engines
from running import KEY, fleet_of, play, running, settings, until

from miles_mixprec.router.proxy import TurnLost, _streams


def test_turn_is_attributed_and_pinned() -> None:
    async def scene() -> None:
        async with engines(4) as fakes, running(fleet=fleet_of(fp8=("fp8", 2, 8), bf16=("bf16", 2, 8))) as router:
            for i, fake in enumerate(fakes):
                pool, view = (("fp8", "fp8"), ("bf16", "bf16"))[i % 2]
                fake.version = 3
                await router.register(fake.url, pool, view, engine=f"{pool}/{i // 2}", slots=8, weight_version=3)
            first = await router.turn("s1", turn="a")
            assert first.status == 200
            for i in range(5):
                again = await router.turn("s1", turn=str(i))
                assert again.source == first.source
            pool, engine, version = first.source
            assert version == 3 and first.headers["X-Mixprec-View"] == pool
            session = await router.call("GET", "/sessions/s1")
            assert session["pool"] == pool and session["engine"] == engine
            assert session["turns"] == [{"engine": engine, "weight_version": 3}] * 6
            assert (await router.call("DELETE", "/sessions/s1"))["status"] == "success"
            await router.call("GET", "/sessions/s1", status=404)
            assert sum(router.pins.active.values()) == 0

    play(scene)


def test_bodies_and_headers_pass_untouched() -> None:
    async def scene() -> None:
        async with engines(1) as (fake,), running() as router:
            await router.call("POST", f"/add_worker?url={fake.url}")
            body = b'{ "turn" : "a",\t"size": 2,  "unicode": "\xc3\xa9" }'
            headers = {
                KEY: "k",
                "Content-Type": "application/json",
                "X-Mine": "1",
                "Connection": "X-Hop",
                "X-Hop": "1",
            }
            async with router.http.post(
                router.url + "/v1/chat/completions?a=%2F", data=body, headers=headers
            ) as reply:
                assert reply.status == 200 and reply.headers["X-Engine"] == "fake"
                payload = await reply.read()
            assert fake.bodies == [body]
            seen = fake.headers[0]
            assert seen["X-Mine"] == "1" and seen[KEY] == "k" and "X-Hop" not in seen
            assert json.loads(payload)["text"] == "xx"

    play(scene)


def test_both_registration_dialects() -> None:
    async def scene() -> None:
        async with engines(2) as fakes, running() as router:
            added = await router.call("POST", f"/add_worker?url={fakes[0].url}")
            assert added["worker_urls"] == {fakes[0].url: 0}
            await router.call("POST", "/workers", {"url": fakes[1].url, "worker_type": "regular"})
            await router.call("POST", "/workers", {"url": fakes[1].url + "@0", "worker_type": "regular"})
            assert (await router.call("GET", "/list_workers"))["urls"] == [fake.url for fake in fakes]
            workers = (await router.call("GET", "/workers"))["workers"]
            assert [worker["url"] for worker in workers] == [fake.url for fake in fakes]
            await router.call("DELETE", f"/workers/{workers[1]['id']}")
            await router.call("POST", f"/remove_worker?url={fakes[0].url}")
            assert (await router.call("GET", "/list_workers"))["urls"] == []
            await router.call("POST", "/add_worker", {}, status=400)
            await router.call("POST", "/remove_worker?url=http://127.0.0.1:1", status=404)

    play(scene)


def test_an_engine_without_a_pool_is_refused_when_it_could_be_several() -> None:
    async def scene() -> None:
        fleet = fleet_of(a=("bf16", 1, 4), b=("fp8", 1, 4))
        async with engines(2) as fakes:
            fleet.pools["b"].urls = [fakes[0].url]
            async with running(fleet=fleet) as router:
                await router.call("POST", f"/add_worker?url={fakes[0].url}")
                assert (await router.call("GET", "/workers"))["workers"][0]["pool"] == "b"
                answer = await router.call("POST", f"/add_worker?url={fakes[1].url}", status=409)
                assert "names no pool" in answer["error"]["message"]

    play(scene)


def test_a_refused_registration_leaves_nothing_behind() -> None:
    async def scene() -> None:
        async with engines(1) as (fake,), running() as router:
            await router.call("POST", "/workers", {"url": fake.url, "pool": "new", "engine": "other/0"}, status=400)
            assert not router.fleet.pools

    play(scene)


def test_an_engine_that_comes_back_under_another_name_replaces_the_former() -> None:
    async def scene() -> None:
        async with engines(1) as (fake,), running() as router:
            for name in ("p/0", "p/1"):
                await router.register(fake.url, "p", slots=4, engine=name)
            workers = (await router.call("GET", "/workers"))["workers"]
            assert [worker["engine"] for worker in workers] == ["p/1"]
            assert list(router.pins.facts["engine"]) == ["p/1"], "a restarted router would know both at one address"
            assert (await router.turn("s")).source[1] == "p/1"

    play(scene)


def test_an_engine_that_answers_nonsense_to_questions_serves_turns() -> None:
    async def scene() -> None:
        async with engines(1, mode="garbage") as (fake,), running() as router:
            await router.register(fake.url, "p", slots=4, weight_version=0)
            engine = next(router.fleet.engines())
            engine.failures = 1
            await until(lambda: engine.failures == 0)  # its /health is good
            assert (await router.turn("s")).status == 200

    play(scene)


def test_streams_pass_as_they_come() -> None:
    async def scene() -> None:
        async with engines(1) as (fake,), running() as router:
            await router.call("POST", f"/add_worker?url={fake.url}")
            reply = await router.turn("s", path="/v1/chat/completions", turn="a", stream=True)
            assert reply.body.count(b"data: ") == 4 and reply.headers["Content-Type"] == "text/event-stream"
            assert len((await router.call("GET", "/sessions/s"))["turns"]) == 1

    play(scene)


def test_heartbeats_keep_a_long_turn_alive_and_its_json_whole() -> None:
    async def scene() -> None:
        async with engines(1) as (fake,), running(settings(heartbeat_s=0.1)) as router:
            await router.register(fake.url, "p", slots=4, weight_version=0)
            reply = await router.turn("s", turn="a", sleep=1.2)
            assert reply.body.startswith(b"  ") and json.loads(reply.body)["meta_info"]["turn"] == "a"
            assert reply.source == ("p", "p/0", 0)
            stream = await router.turn("s", turn="b", sleep=0.6, stream=True)
            assert stream.body.startswith(b"data: ")

    play(scene)


def test_a_turn_has_a_deadline() -> None:
    async def scene() -> None:
        async with engines(1) as (fake,), running(settings(request_timeout_s=0.3)) as router:
            await router.register(fake.url, "p", slots=4)
            reply = await router.turn("s", sleep=30)
            assert reply.status == 504 and b'"deadline"' in reply.body
            await until(lambda: fake.cancelled == 1)
            assert (await router.turn("s")).status == 200

    play(scene)


def test_a_busy_engines_503_passes_after_the_attempts_are_used_up_and_asks_for_patience() -> None:
    async def scene() -> None:
        async with engines(2, mode="storm") as fakes, running(settings(poll_s=5.0)) as router:
            for fake in fakes:
                await router.register(fake.url, "p", slots=40)
            reply = await router.turn("s")
            assert (reply.status, reply.body, reply.headers["Retry-After"]) == (503, b'{"error": "busy"}', "1")
            assert sum(len(fake.asked) for fake in fakes) == 3
            router.proxy.retries_left = 0.0
            await router.turn("t")
            assert sum(len(fake.asked) for fake in fakes) == 4, "without budget nothing is sent again"

    play(scene)


def test_a_turn_that_has_begun_to_beat_is_broken_off_when_its_engine_dies() -> None:
    async def scene() -> None:
        async with engines(2) as fakes, running(settings(heartbeat_s=0.1)) as router:
            for fake in fakes:
                await router.register(fake.url, "p", slots=4)
            home = int((await router.turn("s")).source[1][-1])
            waiting = asyncio.ensure_future(router.turn("s", sleep=20))
            await until(lambda: router.proxy.hops.heartbeats > 2)
            await fakes[home].stop()
            with pytest.raises(aiohttp.ClientError):
                await waiting
            again = await router.turn("s")
            assert again.status == 200 and again.source[1] != f"p/{home}"
            session = await router.call("GET", "/sessions/s")
            assert len(session["turns"]) == 2, "the torn reply is no turn"

    play(scene)


def test_turns_leave_a_silent_engine_although_failed_turns_had_opened_its_breaker() -> None:
    async def scene() -> None:
        async with engines(2) as fakes, running() as router:
            for fake in fakes:
                await router.register(fake.url, "p", slots=4)
            home = int((await router.turn("s")).source[1][-1])
            fakes[home].mode = "hang"
            waiting = asyncio.ensure_future(router.turn("s"))
            await until(lambda: fakes[home].running == 1)
            for _ in range(3):
                router.fleet.failed(router.fleet.urls[fakes[home].url])
            reply = await asyncio.wait_for(waiting, 5)
            assert reply.source[1] == f"p/{1 - home}"

    play(scene)


def test_a_heartbeat_that_was_due_when_an_engine_failed_does_not_name_it_for_anothers_reply() -> None:
    async def scene() -> None:
        async with engines(2) as fakes, running() as router:
            for fake in fakes:
                await router.register(fake.url, "p", slots=4)
            waiting = asyncio.ensure_future(router.turn("s", turn="a", sleep=0.5))
            await until(lambda: sum(fake.running for fake in fakes) == 1)
            (turn,) = router.proxy.turns
            assert turn.engine is not None
            router.proxy.interrupt(turn, TurnLost("it died"))
            router.proxy._beat(turn, turn.engine)
            with pytest.raises(aiohttp.ClientError):
                await waiting
            assert (await router.turn("s")).status == 200

    play(scene)


def test_a_client_that_leaves_as_its_reply_begins_is_not_the_engines_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with engines(1, mode="trickle") as (fake,), running() as router:
            await router.register(fake.url, "p", slots=4)

            prepare = web.StreamResponse.prepare

            async def gone(self: web.StreamResponse, request: Any) -> Any:
                if request.app is router.app and request.path == "/generate":
                    raise ConnectionResetError("Cannot write to closing transport")
                return await prepare(self, request)

            monkeypatch.setattr(web.StreamResponse, "prepare", gone)
            with pytest.raises(aiohttp.ClientError):
                await router.turn("s")
            assert router.proxy.hops.disconnected == 1 and len(fake.asked) == 1

    play(scene)


def test_a_nest_of_brackets_is_no_json() -> None:
    async def scene() -> None:
        nest = b'{"stream": true, "x":' + b"[" * 60_000
        async with running() as router:
            async with router.http.post(router.url + "/workers", data=nest) as reply:
                assert reply.status == 400
            assert _streams(nest), "nor does it end the router's background work"

    play(scene)


def test_an_engines_turns_may_all_be_sent_again() -> None:
    async def scene() -> None:
        async with running(fleet=fleet_of(a=("bf16", 2, 400))) as router:
            assert router.proxy.retries_left == 800

    play(scene)


def test_full_fleet_pushes_back_and_frees_slots() -> None:
    async def scene() -> None:
        async with engines(1) as (fake,), running(settings(session_active_s=0.2)) as router:
            await router.register(fake.url, "p", slots=2)
            assert (await router.turn("a")).status == (await router.turn("b")).status == 200
            full = await router.turn("c")
            assert full.status == 429 and int(full.headers["Retry-After"]) >= 1
            assert (await router.turn("a")).status == 200  # a live session is not a new one
            await until(lambda: not router.pins.live)
            assert (await router.turn("c")).status == 200  # dormant sessions hold no slot

    play(scene)


def test_client_that_leaves_ends_the_engines_work() -> None:
    async def scene() -> None:
        async with engines(1) as (fake,), running() as router:
            await router.register(fake.url, "p", slots=2)
            task = asyncio.ensure_future(router.turn("a", sleep=30))
            await until(lambda: fake.running == 1)
            task.cancel()
            await until(lambda: fake.cancelled == 1)
            await until(lambda: router.proxy.hops.disconnected == 1 and not router.proxy.turns)
            assert len(fake.asked) == 1

    play(scene)


def test_abort_reaches_every_engine_and_questions_any() -> None:
    async def scene() -> None:
        async with engines(3) as fakes, running() as router:
            for fake in fakes:
                await router.register(fake.url, "p", slots=2)
            answer = await router.call("POST", "/abort_request", {"abort_all": True})
            assert answer["success"] and [json.loads(f.aborted[0]) for f in fakes] == [{"abort_all": True}] * 3
            assert (await router.call("GET", "/model_info"))["model_path"] == "fake"
            answer = await router.call("POST", "/update_weights_from_disk", {}, status=404)
            assert "control an engine at its own address" in answer["error"]["message"]

    play(scene)


def test_health_fleet_metrics_and_page() -> None:
    async def scene() -> None:
        async with engines(1) as (fake,), running(fleet=fleet_of(a=("bf16", 1, 4), b=("fp8", 1, 4))) as router:
            await router.call("GET", "/health", status=503)
            await router.register(fake.url, "a", slots=4)
            assert await router.call("GET", "/health") == {"status": "ok", "lost": ["b"]}
            assert (await router.call("GET", "/ready", status=503))["missing"] == {"b": {"serving": 0, "needed": 1}}
            await router.turn("s", turn="1")
            await until(lambda: next(router.fleet.engines()).answered == 0)
            fleet = await router.call("GET", "/fleet")
            assert fleet["pools"]["a"]["active"] == 1 and fleet["pools"]["a"]["engines"]["a/0"]["returned"] == 1
            async with router.http.get(router.url + "/metrics") as reply:
                text = await reply.text()
            assert 'mixprec_router_engine_sent_total{engine="a/0",pool="a"} 1.0' in text
            assert 'mixprec_router_engine_answered{engine="a/0",pool="a"} 0.0' in text, "a version is no counter"
            async with router.http.get(router.url + "/") as reply:
                assert "<title>Router</title>" in await reply.text()

    play(scene)


def tree(folder: Path, **router: Any) -> dict[str, Any]:
    pools = {"a": {"view": "bf16", "slots_per_engine": 4}}
    return {
        "fleet": {"name": "f", "model": "m", "context_length": 1024, "pools": pools},
        "algo": {"name": "plain"},
        "weights": {"store": str(folder)},
        "router": router,
        **{"run_dir": str(folder), "run_id": "r", "updates": 1, "prompts_per_update": 1},
    }


def start(folder: Path, **router: Any) -> subprocess.Popen[str]:
    config = folder / "run.yaml"
    config.write_text(json.dumps(tree(folder, **router)))
    argv = [
        sys.executable,
        "-m",
        "miles_mixprec.router",
        "--config",
        str(config),
        "--ready-file",
        str(folder / "ready"),
    ]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True)


def test_the_process_tells_its_address_and_ends_on_request(tmp_path: Path) -> None:
    process = start(tmp_path)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.05)
    address = json.loads((tmp_path / "ready").read_text())
    with urllib.request.urlopen(address["url"] + "/list_workers") as reply:
        assert json.loads(reply.read()) == {"urls": []}
    assert address["pid"] == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_the_process_says_in_one_line_why_it_does_not_start(tmp_path: Path) -> None:
    process = start(tmp_path, gate="sometimes")
    _, told = process.communicate(timeout=30)
    assert process.returncode == 1
    assert told.strip().startswith("router: router.gate=sometimes") and len(told.strip().splitlines()) == 1


def test_the_process_says_in_one_line_that_its_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start(tmp_path, port=taken.getsockname()[1])
        _, told = process.communicate(timeout=30)
    assert process.returncode == 1
    assert told.strip().startswith("router: ") and "in use" in told and len(told.strip().splitlines()) == 1
