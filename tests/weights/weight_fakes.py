"""An engine and a router that speak just enough HTTP, and remember what was served under which version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_mixprec.weights.checkpoint import Checkpoint
from miles_mixprec.weights.files import checksum, tensor_checksum


def fingerprint(directory: Path) -> str:
    """Digest of every tensor that an engine would load from a directory."""
    checkpoint = Checkpoint(directory)
    return checksum("".join(f"{n}{tensor_checksum(checkpoint[n])}" for n in sorted(checkpoint)).encode())


class FakeEngine:
    """SGLang's update endpoints. `served` holds (version, weights) of every moment at which it would answer."""

    def __init__(self) -> None:
        self.restart()
        self.served: list[tuple[str, str]] = []
        self.calls: list[str] = []
        self.die_before: str | None = None  # the call at which it dies and comes back as it was started
        self.die_after: str | None = None
        self.fail: str | None = None  # the call that it answers with an error

    def restart(self) -> None:
        self.version, self.weights, self.paused = "0", "initial", False

    async def start(self) -> str:
        app = web.Application()
        app.add_routes([web.get("/model_info", self.handle), web.post("/{call}", self.handle)])
        self.server = TestServer(app)
        await self.server.start_server()
        return str(self.server.make_url("")).rstrip("/")

    async def handle(self, request: web.Request) -> web.Response:
        call = request.path.strip("/")
        if call != "model_info":
            self.calls.append(call)
        if self.die_before == call:
            self.die_before = None
            self.restart()
            raise ConnectionResetError
        if self.fail == call:
            return web.json_response({"success": False, "message": "out of memory"}, status=400)
        if call == "pause_generation":
            self.paused = True
            assert (await request.json())["mode"] == "retract"
        elif call == "update_weights_from_disk":
            body = await request.json()
            assert self.paused
            self.weights = "torn"
            self.weights = await asyncio.to_thread(fingerprint, Path(body["model_path"]))
            self.version = body["weight_version"]
        elif call == "continue_generation":
            self.paused = False
        if self.die_after == call:
            self.die_after = None
            self.restart()
            raise ConnectionResetError
        if not self.paused:
            self.served.append((self.version, self.weights))
        return web.json_response({"success": True, "weight_version": self.version})


class FakeRouter:
    """Registrations, in order, and what would be let through: an engine that is `serving`, by its claimed version."""

    def __init__(self) -> None:
        self.workers: list[dict[str, Any]] = []
        self.views: list[tuple[str, int, str]] = []
        self.down = False
        self.authorization: str | None = None

    async def start(self) -> str:
        app = web.Application()
        app.add_routes([web.post("/workers", self.post_worker), web.put("/views/{view}", self.put_view)])
        self.server = TestServer(app)
        await self.server.start_server()
        return str(self.server.make_url("")).rstrip("/")

    async def post_worker(self, request: web.Request) -> web.Response:
        if self.down:
            return web.json_response({}, status=503)
        self.authorization = request.headers.get("Authorization")
        self.workers.append(await request.json())
        return web.json_response({"id": "1"})

    async def put_view(self, request: web.Request) -> web.Response:
        if self.down:
            return web.json_response({}, status=503)
        body = await request.json()
        self.views.append((request.match_info["view"], body["version"], body["run"]))
        return web.json_response({})

    @property
    def states(self) -> list[tuple[str, int | None]]:
        return [(worker["state"], worker["weight_version"]) for worker in self.workers]
