"""An HTTP server that behaves like an SGLang engine, or misbehaves on command. No model, no GPU.

Turns carry `{"turn": id, "sleep": s, "size": bytes}`; the reply repeats the id, and the engine remembers what it was
asked and what it answered, so tests can count both ends.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeEngine:
    version: int | str = 0
    mode: str = "normal"  # normal | hang | drop | half | trickle | storm | forget | garbage
    storm_status: int = 503
    healthy: bool = True
    reported_version: int | str | None = None  # a lie; None: the truth
    kv_use: float = 0.1
    queued: int = 0
    latency: float = 0.0
    name: str = ""  # as the router knows it
    loads_status: int = 200
    url: str = ""
    asked: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    aborted: list[Any] = field(default_factory=list)
    cancelled: int = 0
    running: int = 0
    forgotten: int = 0  # of the running ones: turns it will never answer and does not report
    runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> FakeEngine:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/flush_cache", self._abort)
        app.router.add_post("/{path:.*}", self._turn)
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port, reuse_address=True, backlog=4096)
        await site.start()
        self.url = "http://{}:{}".format(*self.runner.addresses[0][:2])
        return self

    async def stop(self) -> None:
        """Die: the port closes and connections break."""
        if self.runner is not None:
            for connection in list(self.runner.server.connections if self.runner.server else []):
                if connection.transport is not None:
                    connection.transport.abort()
            await self.runner.cleanup()
            self.runner = None

    async def _health(self, request: web.Request) -> web.Response:
        if self.mode == "hang":
            await asyncio.sleep(3600)
        return web.Response(status=200 if self.healthy else 503)

    async def _info(self, request: web.Request) -> web.Response:
        if self.mode == "hang":
            await asyncio.sleep(3600)
        if self.mode == "garbage":
            return web.Response(text="<html>")
        version = self.version if self.reported_version is None else self.reported_version
        return web.json_response({"model_path": "fake", "weight_version": str(version)})

    async def _loads(self, request: web.Request) -> web.Response:
        if self.mode == "hang":
            await asyncio.sleep(3600)
        if self.loads_status != 200:
            return web.Response(status=self.loads_status)
        load = {
            "num_running_reqs": self.running - self.forgotten,
            "num_waiting_reqs": self.queued,
            "token_usage": [] if self.mode == "garbage" else self.kv_use,
        }
        return web.json_response({"loads": [load]})

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append(await request.read())
        return web.Response()

    async def _turn(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        try:
            asked = json.loads(body)
        except ValueError:
            return web.json_response({"error": "not JSON"}, status=400)
        asked = asked if isinstance(asked, dict) else {}
        turn = str(asked.get("turn", ""))
        self.asked.append(turn)
        if self.mode == "storm":
            return web.json_response({"error": "busy"}, status=self.storm_status)
        self.running += 1
        try:
            await asyncio.sleep(float(asked.get("sleep", 0)) + self.latency)
            return await self._reply(request, turn, asked)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _reply(self, request: web.Request, turn: str, asked: dict[str, Any]) -> web.StreamResponse:
        if self.mode == "forget":
            self.forgotten += 1
            try:
                await asyncio.sleep(3600)
            finally:
                self.forgotten -= 1
        if self.mode == "hang":
            await asyncio.sleep(3600)
        if self.mode == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if asked.get("stream"):
            return await self._stream(request, turn)
        meta = {"turn": turn, "weight_version": str(self.version), "finish_reason": {"type": "stop"}}
        body = json.dumps({"text": "x" * int(asked.get("size", 1)), "meta_info": meta}).encode()
        if self.mode == "half":
            response = web.StreamResponse(
                headers={"Content-Type": "application/json", "Content-Length": str(len(body))}
            )
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
            await asyncio.sleep(0.02)
            assert request.transport is not None
            request.transport.abort()
            return response
        if self.mode == "trickle":
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            for i in range(0, len(body), max(1, len(body) // 10)):
                await response.write(body[i : i + max(1, len(body) // 10)])
                await asyncio.sleep(0.05)
        else:
            response = web.Response(body=body, content_type="application/json", headers={"X-Engine": "fake"})
        self.answered.append(turn)
        return response

    async def _stream(self, request: web.Request, turn: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(3):
            await response.write(f"data: {json.dumps({'turn': turn, 'i': i})}\n\n".encode())
            await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        self.answered.append(turn)
        return response


@asynccontextmanager
async def engines(count: int, **settings: Any) -> AsyncIterator[list[FakeEngine]]:
    started = [await FakeEngine(**settings).start() for _ in range(count)]
    try:
        yield started
    finally:
        for engine in started:
            await engine.stop()
