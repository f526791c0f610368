"""Tokens, allow-list, headers, sizes: what must not pass does not."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fake_engine import engines
from running import KEY, play, running, settings

from miles_mixprec.errors import ConfigError
from miles_mixprec.router.failures import Refused
from miles_mixprec.router.security import engine_url
from miles_mixprec.router.server import build_app

CLIENT, ADMIN = {"Authorization": "Bearer client-secret"}, {"Authorization": "Bearer admin-secret"}


def test_tokens(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("C", "client-secret")
    monkeypatch.setenv("A", "admin-secret")
    caplog.set_level(logging.DEBUG)

    async def scene() -> None:
        async with engines(1) as (fake,), running(settings(client_token_env="C", admin_token_env="A")) as router:
            worker = {"url": fake.url, "pool": "p", "view": "bf16", "slots": 4}

            async def status(method: str, path: str, headers: dict[str, str], body: object = None) -> int:
                async with router.http.request(method, router.url + path, json=body, headers=headers) as reply:
                    return reply.status

            assert await status("POST", "/workers", {}, worker) == 401
            assert await status("POST", "/workers", CLIENT, worker) == 403
            assert await status("POST", "/workers", {"Authorization": "Basic admin-secret"}, worker) == 401
            assert await status("POST", "/workers", ADMIN, worker) == 200
            for path in ("/fleet", "/metrics", "/list_workers", "/workers", "/sessions/x", "/model_info"):
                assert await status("GET", path, {}) == 401, path
                assert await status("GET", path, {"Authorization": "Bearer wrong"}) == 403, path
            for method, path in (
                ("PUT", "/views/bf16"),
                ("DELETE", "/workers/p-0"),
                ("POST", "/pools/p/drain"),
                ("POST", "/flush_cache"),
                ("POST", "/add_worker"),
                ("POST", "/remove_worker"),
            ):
                assert await status(method, path, CLIENT, {}) == 403, path
            assert await status("GET", "/health", {}) == 200
            assert await status("POST", "/generate", {}, {}) == 401
            assert await status("POST", "/generate", CLIENT | {KEY: "s"}, {}) == 200
            assert await status("POST", "/generate", ADMIN | {KEY: "s"}, {}) == 200
            assert all("Authorization" not in seen for seen in fake.headers), "the router's own token stays here"

    play(scene)
    assert "secret" not in caplog.text


def test_a_token_that_is_not_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ConfigError, match="NOT_SET is empty"):
        build_app(settings(admin_token_env="NOT_SET"), fleet=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/path",
        "http://127.0.0.1:1/?a=b",
        "http://127.0.0.1:1/#f",
        "http://user:pass@127.0.0.1:1",
        "http://127.0.0.1@evil.example:80",
        "http://evil.example:80",
        "http://127.0.0.1.evil.example:80",
        "ftp://127.0.0.1:1",
        "file:///etc/passwd",
        "127.0.0.1:1",
        "http://[::1",
        "http://127.0.0.1:99999",
        "",
        "http://" + "a" * 600,
        None,
        7,
    ],
)
def test_urls_that_are_no_engine(url: object) -> None:
    with pytest.raises(Refused):
        engine_url(url, ["127.0.0.1", "localhost"])


def test_urls_that_are() -> None:
    assert engine_url("http://127.0.0.1:30000/", ["127.0.0.1"]) == "http://127.0.0.1:30000"
    assert engine_url("http://10.0.3.4:30000@2", ["10.0.*"]) == "http://10.0.3.4:30000"
    assert engine_url("https://a.fleet.example", ["*.fleet.example"]) == "https://a.fleet.example"
    assert engine_url("http://[::1]:8000", ["::1"]) == "http://[::1]:8000"


def test_sizes_are_bounded() -> None:
    async def scene() -> None:
        async with engines(1) as (fake,), running(settings(max_body_mb=1)) as router:
            await router.register(fake.url, "p", slots=4)
            async with router.http.post(router.url + "/generate", data=b"x" * (1 << 21), headers={KEY: "s"}) as reply:
                assert reply.status == 413
            assert (await router.turn("k" * 257)).status == 400
            await router.call("POST", "/workers", {"url": fake.url, "junk": "x" * 70_000}, status=400)
            assert not fake.asked and not router.proxy.turns

    play(scene)


SMUGGLES = [
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nX",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nX-A: b\nX-B: c\r\n Content-Length: 3\r\n\r\nabc",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
    b"POST /workers HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
    b"POST http://evil.example/generate HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 0\r\n\r\n",
    b"GET //evil.example/model_info HTTP/1.1\r\nHost: x\r\n\r\n",
]


@pytest.mark.parametrize("raw", SMUGGLES)
def test_ambiguous_requests_do_not_reach_an_engine(raw: bytes) -> None:
    async def scene() -> None:
        async with engines(1) as (fake,), running() as router:
            await router.register(fake.url, "p", slots=4)
            host, port = router.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(raw)
            line = await asyncio.wait_for(reader.readline(), 5)
            assert line.split()[1] in (b"400", b"404"), line
            writer.close()
            assert not fake.asked

    play(scene)


def test_a_token_that_is_no_text_is_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("C", "client-secret")

    async def scene() -> None:
        async with running(settings(client_token_env="C")) as router:
            host, port = router.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n")
            line = await asyncio.wait_for(reader.readline(), 5)
            assert line.split()[1] == b"403", line
            writer.close()

    play(scene)
