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
from pathlib import Path

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from yarl import URL

from miles_mixprec.config import Config, Fleet, Router
from miles_mixprec.router.admin import Admin
from miles_mixprec.router.failures import NotFound, Refused
from miles_mixprec.router.metrics import RouterCollector, fleet_json
from miles_mixprec.router.proxy import Proxy
from miles_mixprec.router.security import Access
from miles_mixprec.router.sessions import Journal, MemoryPins
from miles_mixprec.router.state import LiveFleet
from miles_mixprec.router.watch import Watch

log = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("page.html")
TURNS = ("/generate", "/encode", "/classify", "/tokenize", "/detokenize", "/rerank", "/score", "/v1/{path:.+}")
QUESTIONS = ("/get_model_info", "/model_info", "/get_server_info", "/server_info", "/health_generate", "/get_load")

KEEP_ALIVE_S = 4.0  # below uvicorn's 5 s, so that engines do not close a connection under a request
READ_BUFFER = 1024 * 1024
CONNECT_S = 5.0

PROXY = web.AppKey("proxy", Proxy)
FLEET = web.AppKey("fleet", LiveFleet)

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
    app[PROXY], app[FLEET] = proxy, live
    app.cleanup_ctx.append(life)
    _add_turns(app, proxy)
    _add_admin(app, Admin(proxy, watch), access)
    _add_reports(app, proxy)
    app.router.add_route("*", "/{path:.*}", _guarded(_unknown, access))
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


def _add_turns(app: web.Application, proxy: Proxy) -> None:
    for path in TURNS:
        app.router.add_post(path, proxy.generate)
    for path in (*QUESTIONS, "/v1/{path:.+}"):
        app.router.add_get(path, proxy.inform)


def _add_admin(app: web.Application, admin: Admin, access: Access) -> None:
    def add(method: str, path: str, handler: Handler, *, by_admin: bool = True) -> None:
        app.router.add_route(method, path, _guarded(handler, access, admin=by_admin))

    add("POST", "/workers", admin.post_worker)
    add("DELETE", "/workers/{id:.+}", admin.delete_worker)
    add("POST", "/add_worker", admin.add_worker)
    add("POST", "/remove_worker", admin.remove_worker)
    add("PUT", "/views/{view}", admin.put_view)
    add("POST", "/pools/{pool}/drain", admin.drain_pool)
    add("POST", "/pools/{pool}/undrain", admin.drain_pool)
    add("POST", "/flush_cache", admin.tell_engines)
    add("GET", "/workers", admin.get_workers, by_admin=False)
    add("GET", "/list_workers", admin.list_workers, by_admin=False)
    add("GET", "/sessions/{key:.+}", admin.get_session, by_admin=False)
    add("DELETE", "/sessions/{key:.+}", admin.delete_session, by_admin=False)
    add("POST", "/abort_request", admin.tell_engines, by_admin=False)


def _add_reports(app: web.Application, proxy: Proxy) -> None:
    live, registry = proxy.fleet, CollectorRegistry()
    registry.register(RouterCollector(proxy))

    async def health(request: web.Request) -> web.Response:
        """The router works and some pool answers; 503 while none does."""
        lost = [pool.name for pool in live.pools.values() if pool.breaker == "open"]
        up = len(lost) < len(live.pools)
        return web.json_response({"status": "ok" if up else "no pool", "lost": lost}, status=200 if up else 503)

    async def ready(request: web.Request) -> web.Response:
        """Every pool has the engines it needs to start (`min_engines`, at least one) at an accepted version."""
        missing = {}
        for pool in live.pools.values():
            serving = sum(engine.accepts(0) for engine in pool.engines.values())
            if serving < max(pool.min_engines, 1):
                missing[pool.name] = {"serving": serving, "needed": max(pool.min_engines, 1)}
        return web.json_response({"ready": not missing, "missing": missing}, status=503 if missing else 200)

    async def fleet(request: web.Request) -> web.Response:
        return web.json_response(fleet_json(proxy))

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain", charset="utf-8")

    async def page(request: web.Request) -> web.FileResponse:
        return web.FileResponse(PAGE)

    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/", page)
    app.router.add_get("/fleet", _guarded(fleet, proxy.access))
    app.router.add_get("/metrics", _guarded(metrics, proxy.access))


async def _unknown(request: web.Request) -> web.Response:
    raise NotFound(
        f"{request.method} {request.path}: neither a turn nor an endpoint of the router; "
        "control an engine at its own address (GET /list_workers)"
    )


def _guarded(handler: Handler, access: Access, *, admin: bool = False) -> Handler:
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
            partial = ready_file.with_name(ready_file.name + ".part")
            partial.write_text(json.dumps({"host": host, "port": port, "url": url, "pid": os.getpid()}))
            partial.replace(ready_file)
        gc.freeze()  # what is loaded stays; requests leave few cycles behind, so look for them less often
        gc.set_threshold(20_000, 20, 50)
        await stop.wait()
    finally:
        await runner.cleanup()
