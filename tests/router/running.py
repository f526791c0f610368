"""A router on a free port of the test's own event loop, and shorthands to talk to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from miles_mixprec.config import Fleet, Pool, Router
from miles_mixprec.router.proxy import Proxy
from miles_mixprec.router.server import PROXY, build_app
from miles_mixprec.router.sessions import MemoryPins
from miles_mixprec.router.state import LiveFleet

KEY = "X-SMG-Routing-Key"


@dataclass
class Running:
    url: str
    http: aiohttp.ClientSession
    app: web.Application

    @property
    def fleet(self) -> LiveFleet:
        return self.proxy.fleet

    @property
    def pins(self) -> MemoryPins:
        return self.proxy.pins

    @property
    def proxy(self) -> Proxy:
        return self.app[PROXY]

    async def register(self, url: str, pool: str, view: str = "bf16", **fields: Any) -> dict[str, Any]:
        return await self.call("POST", "/workers", {"url": url, "pool": pool, "view": view, **fields})

    async def call(self, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
        async with self.http.request(method, self.url + path, json=body) as reply:
            text = await reply.text()
            assert reply.status == status, (method, path, reply.status, text)
            return await reply.json(content_type=None)

    async def turn(self, key: str | None, path: str = "/generate", **fields: Any) -> Reply:
        headers = {} if key is None else {KEY: key}
        async with self.http.post(self.url + path, json=fields, headers=headers) as reply:
            return Reply(reply.status, dict(reply.headers), await reply.read())


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def source(self) -> tuple[str, str, int]:
        """Pool, engine and version according to the headers."""
        head = self.headers
        return head["X-Mixprec-Pool"], head["X-Mixprec-Engine"], int(head["X-Mixprec-Weight-Version"])


def settings(**changes: Any) -> Router:
    """Defaults of the tests: quick polls, short waits."""
    return Router(**{"poll_s": 0.1, "gate_wait_s": 2.0, "heartbeat_s": 5.0, "request_timeout_s": 30.0} | changes)


def fleet_of(**pools: tuple[str, int, int]) -> Fleet:
    """`name=(view, engines, slots per engine)`."""
    made = {name: Pool(view=v, engines=n, slots_per_engine=slots) for name, (v, n, slots) in pools.items()}
    return Fleet(name="test", model="m", context_length=1024, pools=made)


@asynccontextmanager
async def running(
    router: Router | None = None, fleet: Fleet | None = None, *, run_id: str = "t"
) -> AsyncIterator[Running]:
    app = build_app(router or settings(), fleet or Fleet(name="test", model="m", context_length=1), run_id=run_id)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        try:
            yield Running(url, http, app)
        finally:
            await runner.cleanup()


def play(scene: Callable[[], Coroutine[Any, Any, None]], limit_s: float = 60.0) -> None:
    """Run a test's coroutine on uvloop, as the router runs."""
    uvloop.run(asyncio.wait_for(scene(), limit_s))


async def until(condition: Callable[[], bool | Awaitable[bool]], limit_s: float = 10.0) -> float:
    """Wait for `condition`; the seconds it took."""
    began = time.monotonic()
    while True:
        value = condition()
        if value if isinstance(value, bool) else await value:
            return time.monotonic() - began
        assert time.monotonic() - began < limit_s, "condition never held"
        await asyncio.sleep(0.02)
