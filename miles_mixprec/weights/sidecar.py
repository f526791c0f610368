"""The sidecar: keeps one engine on the newest version of its view, and says truly which version it serves.

    python -m miles_mixprec.weights.sidecar --config run.yaml --router http://127.0.0.1:8000 --staging /scratch \\
        --engine fp8/0=http://127.0.0.1:30000 [--engine fp8/1=...]

A version is staged and verified while the engine serves. Then the router is told that the engine is updating, the
engine pauses (running requests are retracted and later recomputed on the new weights), loads, reports the new
version, continues, and only then is registered as serving it. A record of what the engine serves is removed before the
pause and written after the continue, so whatever dies in between, the next sidecar loads the newest version anew.
Nothing goes backwards unless the run resumed as a new attempt.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch

from miles_mixprec.config import Config, from_file
from miles_mixprec.errors import ConfigError, EngineError, StoreError
from miles_mixprec.headers import authorization
from miles_mixprec.weights.checkpoint import decode_checkpoint
from miles_mixprec.weights.delta import stage
from miles_mixprec.weights.files import write_local
from miles_mixprec.weights.store import Store, open_store
from miles_mixprec.weights.version import Pointer

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0
CALL_TIMEOUT_S = 30.0
_LONGEST_PAUSE_S = 5.0
_INITIAL = ("default", "0")  # what an engine reports that still serves the model it was started from


class Stager:
    """Verified local directories of versions, shared by the sidecars of one process."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._staged: dict[tuple[str, str, str], asyncio.Task[Path]] = {}

    async def directory(self, store: Store, view: str, pointer: Pointer, execution: str) -> Path:
        """What an engine of `execution` loads to serve `pointer`. Raises StoreError."""
        key = view, execution, pointer.manifest
        staged = self._staged.get(key)
        if staged is None or (staged.done() and not (staged.exception() is None and staged.result().is_dir())):
            self._staged[key] = asyncio.create_task(
                asyncio.to_thread(_stage, store, view, pointer, execution, self._root)
            )
        return await asyncio.shield(self._staged[key])


def _stage(store: Store, view: str, pointer: Pointer, execution: str, root: Path) -> Path:
    replica = stage(store, view, pointer, root / f"{view}-{execution}")
    if execution == "native" or view == "bf16":
        return replica.directory
    target = root / f"{view}-decoded" / f"{pointer.version:06d}-{pointer.manifest[:12]}"
    shutil.rmtree(target, ignore_errors=True)
    decode_checkpoint(replica.directory, target)
    for old in sorted(target.parent.iterdir(), key=os.path.getmtime)[:-2]:  # the engine may fall back to its last one
        shutil.rmtree(old)
    return target


class Sidecar:
    """Follows one engine's view. `run` loops; `step` is one look at store and engine."""

    def __init__(
        self,
        name: str,
        url: str,
        config: Config,
        router: str,
        staging: Path,
        session: aiohttp.ClientSession,
        stager: Stager,
    ) -> None:
        """`name`: `<pool>/<index>`. Raises ConfigError for an unknown pool, or if the router's token is not there."""
        pool_name = name.split("/")[0]
        if pool_name not in config.fleet.pools:
            raise ConfigError(f"engine {name}: fleet {config.fleet.name} has no such pool; use <pool>/<index>")
        self.name, self._url, self._pool_name = name, url.rstrip("/"), pool_name
        self._pool = config.fleet.pools[pool_name]
        self._config = config
        self._router = router.rstrip("/")
        self._headers = authorization(config.router, admin=True)
        self._http = session
        self._stager = stager
        self._record = staging / "serving" / f"{name.replace('/', '-')}.json"
        self._serving: Pointer | None = self._recorded()
        self._announced: tuple[int, int] | None = None
        self._registered: tuple[float, dict[str, Any]] = (0.0, {})

    async def run(self) -> None:
        """Step until cancelled. What fails is tried again after growing pauses, and logged when it changes."""
        failures, told = 0, ""
        while True:
            try:
                await self.step()
                failures, told = 0, ""
            except (StoreError, EngineError, OSError, aiohttp.ClientError, asyncio.TimeoutError) as error:
                failures += 1
                if (text := " ".join(str(error).split()) or type(error).__name__) != told:
                    logger.warning("%s: %s", self.name, text)
                    told = text
            await asyncio.sleep(min(self._config.weights.poll_s * 2 ** min(failures, 10), _LONGEST_PAUSE_S))

    async def step(self) -> None:
        """Bring the engine to the newest version if it is not there, and keep it registered."""
        store = await asyncio.to_thread(open_store, self._config.weights.store, self._config.run_id)
        pointer = None if store is None else await asyncio.to_thread(store.latest, self._pool.view)
        try:
            served = await self._served()
        except (EngineError, aiohttp.ClientError, asyncio.TimeoutError):
            await self._register("updating", None)
            raise
        if self._serving is not None and served != str(self._serving.version):
            self._serve(None)  # restarted, or loaded by someone else
        if store is None or pointer is None:
            await self._register(*(("serving", 0) if served in _INITIAL else ("updating", None)))
            return
        now = self._serving
        if now is not None and now.order > pointer.order:
            raise StoreError(
                f"latest/{self._pool.view} went back from version {now.version} to {pointer.version} in "
                f"attempt {pointer.attempt}; keeping the newer one"
            )
        if now is not None and now.manifest == pointer.manifest:
            self._serve(pointer)
            await self._announce(pointer)
            await self._register("serving", pointer.version)
            return
        if now is None or now.attempt != pointer.attempt:  # unknown weights, or weights of an attempt that ended
            self._serve(None)
            await self._register("updating", None)
        await self._announce(pointer)
        await self._apply(store, pointer)

    async def _apply(self, store: Store, pointer: Pointer) -> None:
        directory = await self._stager.directory(store, self._pool.view, pointer, self._pool.execution)
        self._serve(None)
        await self._register("updating", None)
        started = time.monotonic()
        await self._post("/pause_generation", {"mode": "retract"})  # SGLang cannot load from disk in an in-place pause
        await self._post(
            "/update_weights_from_disk",
            {"model_path": str(directory), "weight_version": str(pointer.version), "flush_cache": True},
            timeout_s=LOAD_TIMEOUT_S,
        )
        if (served := await self._served()) != str(pointer.version):
            raise EngineError(f"engine {self.name} reports version {served} after loading {pointer.version}")
        now = await asyncio.to_thread(open_store, store.root, store.run)
        if now is None or now.attempt != pointer.attempt:
            raise StoreError("the run was resumed meanwhile; loading its version instead")  # the engine stays paused
        await self._post("/continue_generation", {})
        self._serve(pointer)
        await self._register("serving", pointer.version)
        pause = time.monotonic() - started
        logger.info("%s serves version %d after a pause of %.3f s", self.name, pointer.version, pause)

    async def _served(self) -> str:
        async with self._http.get(f"{self._url}/model_info") as reply:
            if reply.status != 200:
                raise EngineError(f"engine {self.name}: /model_info answers {reply.status}")
            return str((await reply.json())["weight_version"])

    async def _post(self, path: str, body: Mapping[str, Any], *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._http.post(self._url + path, json=body, timeout=timeout) as reply:
            text = await reply.text()
            if reply.status != 200:
                raise EngineError(f"engine {self.name}: {path} answers {reply.status}: {text[:200]}")

    async def _announce(self, pointer: Pointer) -> None:
        if self._announced != pointer.order:
            body = {"version": pointer.version, "run": f"{pointer.run}#{pointer.attempt}"}
            await self._tell("PUT", f"/views/{self._pool.view}", body)
            self._announced = pointer.order

    async def _register(self, state: str, version: int | None) -> None:
        body = {
            "url": self._url,
            "pool": self._pool_name,
            "view": self._pool.view,
            "engine": self.name,
            "slots": self._pool.slots_per_engine,
            "weight_version": version,
            "state": state,
        }
        at, last = self._registered
        if body != last or time.monotonic() - at > self._config.router.heartbeat_s:
            await self._tell("POST", "/workers", body)
            self._registered = time.monotonic(), body

    async def _tell(self, method: str, path: str, body: Mapping[str, Any]) -> None:
        async with self._http.request(method, self._router + path, json=body, headers=self._headers) as reply:
            if reply.status >= 400:
                raise EngineError(f"router refuses {method} {path}: {reply.status} {(await reply.text())[:200]}")

    def _serve(self, pointer: Pointer | None) -> None:
        if pointer == self._serving:
            return
        self._serving = pointer
        if pointer is None:
            self._record.unlink(missing_ok=True)
        else:
            write_local(self._record, msgspec.json.encode(pointer))

    def _recorded(self) -> Pointer | None:
        try:
            return msgspec.json.decode(self._record.read_bytes(), type=Pointer)
        except (FileNotFoundError, msgspec.DecodeError):
            return None


async def serve(config: Config, engines: Mapping[str, str], router: str, staging: Path) -> None:
    """Run a sidecar for each of `engines` (name -> URL) until cancelled."""
    stager = Stager(staging)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)) as session:
        sidecars = [Sidecar(*engine, config, router, staging, session, stager) for engine in engines.items()]
        await asyncio.gather(*(sidecar.run() for sidecar in sidecars))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m miles_mixprec.weights.sidecar", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="resolved configuration of the run (YAML)")
    parser.add_argument("--router", required=True, help="URL of the session router")
    parser.add_argument("--staging", required=True, type=Path, help="local directory for staged versions")
    parser.add_argument("--engine", required=True, action="append", metavar="POOL/INDEX=URL", help="repeatable")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s sidecar %(message)s")
    torch.set_num_threads(1)
    engines = dict(engine.split("=", 1) for engine in options.engine)
    asyncio.run(serve(from_file(options.config), engines, options.router, options.staging))


if __name__ == "__main__":
    main()
