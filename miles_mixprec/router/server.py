"""The router as an aiohttp application and as a process."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import aiohttp
from aiohttp import web
from yarl import URL

from miles_mixprec.config import Config, Fleet, Router
from miles_mixprec.router.admin import Admin
from miles_mixprec.router.failures import Refused
from miles_mixprec.router.proxy import Proxy
from miles_mixprec.router.security import Access
from miles_mixprec.router.sessions import Journal, MemoryPins
from miles_mixprec.router.state import LiveFleet
from miles_mixprec.router.watch import Watch

log = logging.getLogger(__name__)

TURNS = ("/generate", "/encode", "/classify", "/tokenize", "/detokenize", "/rerank", "/score", "/v1/{path:.+}")
QUESTIONS = (
    *("/get_model_info", "/model_info", "/get_server_info", "/server_info", "/get_load", "/health_generate"),
    "/v1/{path:.+}",
)
KEEP_ALIVE_S = 4.0  # below uvicorn's 5 s, so that engines do not close a connection under a request
READ_BUFFER = 1024 * 1024
CONNECT_S = 5.0

PROXY = web.AppKey("proxy", Proxy)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(router: Router, fleet: Fleet, *, run_id: str = "run") -> web.Application:
    """The router of `fleet`. Its connections and background work start and stop with the application.

    `run_id` keeps the sessions of several runs apart in one Redis. Raises ConfigError for tokens that are not there.
    """
    access, pins = Access(router), _pins(router, run_id)
    live = LiveFleet(fleet, pins.active, time.monotonic)
    proxy = Proxy(router, live, pins, access)
    watch = Watch(proxy)

    async def life(app: web.Application) -> AsyncIterator[None]:
        async with _client() as proxy.http:
            await pins.open(time.monotonic())
            live.recall(pins.facts)
            task = asyncio.ensure_future(watch.run())
            yield
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await pins.close()

    app = web.Application(client_max_size=router.max_body_mb * 2**20)
    app[PROXY] = proxy
    app.cleanup_ctx.append(life)
    app.add_routes(_routes(proxy, Admin(proxy, watch)))
    return app


def _client() -> aiohttp.ClientSession:
    """One connection pool to all engines."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        read_bufsize=READ_BUFFER,
    )


def _pins(router: Router, run_id: str) -> MemoryPins:
    life = router.session_active_s, router.session_idle_s, router.max_sessions
    if router.redis_url is None:
        return MemoryPins(*life, Journal(Path(router.journal)) if router.journal is not None else None)
    from miles_mixprec.router.redis_pins import RedisPins  # redis-py is an optional dependency

    return RedisPins(router.redis_url, f"mixprec:{run_id}", *life)


def _routes(proxy: Proxy, admin: Admin) -> list[web.RouteDef]:
    client = partial(_guarded, proxy.access)
    administrator = partial(_guarded, proxy.access, admin=True)
    return [
        *(web.post(path, proxy.generate) for path in TURNS),
        *(web.get(path, proxy.inform) for path in QUESTIONS),
        web.get("/", admin.page),
        web.get("/health", admin.health),
        web.get("/ready", admin.ready),
        web.get("/fleet", client(admin.get_fleet)),
        web.get("/metrics", client(admin.metrics)),
        web.get("/workers", client(admin.get_workers)),
        web.get("/list_workers", client(admin.list_workers)),
        web.get("/sessions/{key:.+}", client(admin.get_session)),
        web.delete("/sessions/{key:.+}", client(admin.delete_session)),
        web.post("/abort_request", client(admin.tell_engines)),
        web.post("/flush_cache", administrator(admin.tell_engines)),
        web.post("/workers", administrator(admin.post_worker)),
        web.delete("/workers/{id:.+}", administrator(admin.delete_worker)),
        web.post("/add_worker", administrator(admin.add_worker)),
        web.post("/remove_worker", administrator(admin.remove_worker)),
        web.put("/views/{view}", administrator(admin.put_view)),
        web.post("/pools/{pool}/drain", administrator(admin.drain_pool)),
        web.post("/pools/{pool}/undrain", administrator(admin.drain_pool)),
        web.route("*", "/{path:.*}", client(admin.unknown)),
    ]


def _guarded(access: Access, handler: Handler, *, admin: bool = False) -> Handler:
    async def guarded(request: web.Request) -> web.StreamResponse:
        try:
            access.check(request, admin=admin)
            return await handler(request)
        except Refused as refusal:
            return refusal.response()

    return guarded


async def serve(config: Config, *, ready_file: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT. `ready_file` gets `{"host", "port", "url", "pid"}` once the address is bound."""
    router = config.router
    app = build_app(router, config.fleet, run_id=config.run_id)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, keepalive_timeout=75.0)
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    try:
        await runner.setup()
        await web.TCPSite(runner, router.host, router.port, backlog=4096, reuse_address=True).start()
        host, port = runner.addresses[0][:2]
        url = str(URL.build(scheme="http", host=host, port=port))
        log.info("router of fleet %s at %s", config.fleet.name, url)
        if ready_file is not None:
            unfinished = ready_file.with_name(ready_file.name + ".part")
            unfinished.write_text(json.dumps({"host": host, "port": port, "url": url, "pid": os.getpid()}))
            unfinished.replace(ready_file)
        gc.freeze()  # what is loaded stays; requests leave few cycles behind, so look for them less often
        gc.set_threshold(20_000, 20, 50)
        await stop.wait()
    finally:
        await runner.cleanup()
