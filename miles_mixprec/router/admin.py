"""Registration, views, sessions, administration and reports: everything that is not a turn.

Both of Miles' dialects register engines: `/add_worker`, `/remove_worker`, `/list_workers` (its own router) and
`/workers` (sglang_router). The house's own registration is `POST /workers` with a pool; docs/router.md lists all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from miles_mixprec.config import POOL_NAME, VIEWS
from miles_mixprec.router import gate
from miles_mixprec.router.failures import NotFound, Refused
from miles_mixprec.router.metrics import RouterCollector, fleet_json
from miles_mixprec.router.proxy import Proxy
from miles_mixprec.router.security import engine_url
from miles_mixprec.router.state import STATES, Engine
from miles_mixprec.router.watch import Watch

PAGE = Path(__file__).with_name("page.html")
MAX_BODY = 64 * 1024
MAX_ENGINES = 4096
MAX_VERSION = 2**53
VERIFY_S = 2.0
TELL_S = 10.0
NO_ANSWER = (aiohttp.ClientError, asyncio.TimeoutError, OSError)

_FIELDS: dict[str, tuple[type, Callable[[Any], object], str]] = {  # type, condition, what a caller is told of it
    "pool": (str, POOL_NAME.fullmatch, "1-40 of a-z 0-9 _ -, a letter or digit first"),
    "view": (str, VIEWS.__contains__, f"use one of {', '.join(VIEWS)}"),
    "engine": (str, bool, "a string like fp8/0"),
    "slots": (int, range(1, 65537).__contains__, "an integer in 1..65536"),
    "state": (str, STATES.__contains__, f"use one of {', '.join(STATES)}"),
    "run": (str, lambda run: True, "a string"),
}


class Admin:
    """Handlers beside the data path."""

    def __init__(self, proxy: Proxy, watch: Watch) -> None:
        self.proxy = proxy
        self.fleet = proxy.fleet
        self.pins = proxy.pins
        self.watch = watch
        self.registry = CollectorRegistry()
        self.registry.register(RouterCollector(proxy))

    # -- engines ------------------------------------------------------------------------------------------------

    async def post_worker(self, request: web.Request) -> web.Response:
        engine = await self._register(await _json_body(request))
        return web.json_response({"status": "success", "worker_id": engine.id, **_describe(engine)})

    async def add_worker(self, request: web.Request) -> web.Response:
        await self._register({"url": await _url_argument(request)})
        return web.json_response(
            {"status": "success", "worker_urls": {e.url: len(e.in_flight) for e in self.fleet.engines()}}
        )

    async def _register(self, body: dict[str, Any]) -> Engine:
        url = engine_url(body.get("url"), self.proxy.router.allowed_workers)
        pool, view, name, slots, state = (_field(body, key) for key in ("pool", "view", "engine", "slots", "state"))
        version = _version(body, "weight_version")
        former = self.fleet.urls.get(url)
        if former is None and len(self.fleet.urls) >= MAX_ENGINES:
            raise Refused(f"{MAX_ENGINES} engines are registered; remove some first")
        engine = self.fleet.register(url, pool, view, name=name, slots=slots, state=state, version=version)
        if former is not None and former is not engine:
            await self.pins.remember("engine", former.name, None)
        await self.pins.remember("engine", engine.name, engine.registration())
        if version is not None:  # hold the claim against the engine's own answer before the gate believes it
            with contextlib.suppress(*NO_ANSWER):  # its next probe asks again
                await asyncio.wait_for(self.watch.read_version(engine), VERIFY_S)
        return engine

    async def remove_worker(self, request: web.Request) -> web.Response:
        return await self._remove(engine_url(await _url_argument(request), ["*"]))

    async def delete_worker(self, request: web.Request) -> web.Response:
        return await self._remove(request.match_info["id"])

    async def _remove(self, wanted: str) -> web.Response:
        for engine in self.fleet.engines():
            if wanted in (engine.id, engine.name, engine.url):
                self.fleet.remove(engine)
                await self.pins.remember("engine", engine.name, None)
                return web.json_response({"status": "success", "id": engine.id})
        raise NotFound(f"no engine with id or url {wanted!r}; see GET /workers")

    async def get_workers(self, request: web.Request) -> web.Response:
        workers = [_describe(engine) for engine in self.fleet.engines()]
        return web.json_response({"workers": workers, "total": len(workers)})

    async def list_workers(self, request: web.Request) -> web.Response:
        return web.json_response({"urls": [engine.url for engine in self.fleet.engines()]})

    # -- views and pools ----------------------------------------------------------------------------------------

    async def put_view(self, request: web.Request) -> web.Response:
        view = _field(request.match_info, "view")
        body = await _json_body(request)
        version, run = _version(body, "version"), _field(body, "run")
        if version is None:
            raise Refused(f"view {view}: version must be an integer in 0..2^53, got {body.get('version')!r}")
        self.fleet.announce(view, version, run)
        known = self.fleet.views[view]
        await self.pins.remember("view", view, [known.version, known.run, known.former])
        return web.json_response({"view": view, "version": known.version, "run": known.run})

    async def drain_pool(self, request: web.Request) -> web.Response:
        """`POST /pools/{pool}/drain` or `/undrain`: live sessions go on, new ones go elsewhere (or come back)."""
        name = request.match_info["pool"]
        pool = self.fleet.pools.get(name)
        if pool is None:
            raise NotFound(f"no pool {name!r}; the fleet has {', '.join(self.fleet.pools)}")
        pool.draining = request.path.endswith("/drain")
        self.fleet.changed(pool)
        await self.pins.remember("drain", pool.name, True if pool.draining else None)
        return web.json_response({"pool": pool.name, "draining": pool.draining})

    # -- sessions -----------------------------------------------------------------------------------------------

    async def get_session(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        pin = await self.pins.find(key)
        if pin is None:
            raise NotFound(f"no session {key!r}: it never had a turn, has ended, or was idle for too long")
        turns = [{"engine": engine, "weight_version": version} for engine, version in await self.pins.turns(pin)]
        return web.json_response(
            {"key": key, "pool": pin.pool, "engine": pin.engine, "view": pin.view, "turns": turns}
        )

    async def delete_session(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        if not await self.pins.release(key):
            raise NotFound(f"no session {key!r}")
        return web.json_response({"status": "success", "key": key})

    # -- all engines at once ------------------------------------------------------------------------------------

    async def tell_engines(self, request: web.Request) -> web.Response:
        """Send the request to every engine; 200 with each one's status if all took it, else 502."""
        body = await request.read()
        headers, timeout = {"Content-Type": request.content_type}, aiohttp.ClientTimeout(total=TELL_S)

        async def tell(engine: Engine) -> int:
            try:
                async with self.proxy.http.post(
                    engine.address(request.path), data=body, headers=headers, timeout=timeout
                ) as reply:
                    await reply.read()
                    return reply.status
            except NO_ANSWER:
                return 0

        engines = [engine for engine in self.fleet.engines() if engine.breaker != "open"]
        statuses = await asyncio.gather(*(tell(engine) for engine in engines))
        done = all(status == 200 for status in statuses)
        answer = {"success": done, "engines": dict(zip((e.name for e in engines), statuses, strict=True))}
        return web.json_response(answer, status=200 if done else 502)

    # -- reports ------------------------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        """The router works and some pool answers; 503 while none does."""
        pools = self.fleet.pools.values()
        lost = [pool.name for pool in pools if pool.breaker == "open"]
        up = len(lost) < len(pools)
        return web.json_response({"status": "ok" if up else "no pool", "lost": lost}, status=200 if up else 503)

    async def ready(self, request: web.Request) -> web.Response:
        """Every pool has the engines it needs to start: `min_engines`, at least one."""
        missing = {}
        for pool in self.fleet.pools.values():
            serving, needed = sum(engine.accepts(0) for engine in pool.engines.values()), max(pool.min_engines, 1)
            if serving < needed:
                missing[pool.name] = {"serving": serving, "needed": needed}
        return web.json_response({"ready": not missing, "missing": missing}, status=503 if missing else 200)

    async def get_fleet(self, request: web.Request) -> web.Response:
        return web.json_response(fleet_json(self.proxy))

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.registry), content_type="text/plain", charset="utf-8")

    async def page(self, request: web.Request) -> web.FileResponse:
        return web.FileResponse(PAGE)

    async def unknown(self, request: web.Request) -> web.Response:
        raise NotFound(
            f"{request.method} {request.path}: neither a turn nor an endpoint of the router; "
            "control an engine at its own address (GET /list_workers)"
        )


def _describe(engine: Engine) -> dict[str, Any]:
    """An engine in the words of registration, with what is known of it."""
    return {
        "id": engine.id,
        "url": engine.url,
        "pool": engine.pool.name,
        "view": engine.pool.view,
        "engine": engine.name,
        "slots": engine.slots,
        "state": engine.state,
        "weight_version": engine.version,
        "is_healthy": engine.breaker == "closed",
        "worker_type": "regular",
    }


async def _json_body(request: web.Request) -> dict[str, Any]:
    text = await request.read()
    if len(text) > MAX_BODY:
        raise Refused(f"body of {len(text)} bytes; at most {MAX_BODY} here")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused("body must be a JSON object")
    return body


def _field(body: Mapping[str, Any], key: str) -> Any:
    """What `body` says under `key`, None if nothing. Raises Refused for a value that will not do."""
    value = body.get(key)
    if value is not None:
        kind, good, rule = _FIELDS[key]
        if not isinstance(value, kind) or isinstance(value, bool) or not good(value):
            raise Refused(f"{key} {value!r:.80}: {rule}")
    return value


def _version(body: Mapping[str, Any], key: str) -> int | None:
    version = gate.parse(body.get(key))
    if version is not None and not 0 <= version < MAX_VERSION:
        raise Refused(f"{key} {version}: must lie in 0..2^53")
    return version


async def _url_argument(request: web.Request) -> Any:
    """The URL of Miles' own dialect, from the query or the body."""
    url = request.query.get("url") or request.query.get("worker_url")
    if url is None and request.can_read_body:
        body = await _json_body(request)
        url = body.get("url") or body.get("worker_url")
    return url
