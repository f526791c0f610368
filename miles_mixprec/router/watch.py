"""Probes of the engines and the control loop: what is alive, which version it serves, how loaded it is.

An engine's /health says whether it makes progress (SGLang generates a token for it when nothing else is running), its
/model_info which weights it serves, its /v1/loads what it is doing. The answers of the engine are the ground truth
against which sidecars' reports are held.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import signal
from typing import Any

import aiohttp

from miles_mixprec.router import capacity, gate
from miles_mixprec.router.proxy import Proxy, TurnLost
from miles_mixprec.router.state import Engine

log = logging.getLogger(__name__)

TICK_S = 0.25
CONTROL_S = 5.0
FADE = 0.95  # of the latency window per control period: about 100 s
UPDATE_GRACE_S = 900.0  # an engine may be silent for this long while it applies an update


class Watch:
    """Background work of a router; `run` lasts until it is cancelled."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.fleet = proxy.fleet
        self.pins = proxy.pins
        self.poll_s = proxy.router.poll_s
        self.probes: dict[Engine, asyncio.Task[None]] = {}
        self.due: dict[Engine, float] = {}

    async def run(self) -> None:
        try:
            await self._run()
        except Exception:  # without this work the router would serve blindly
            log.critical("the router's background work failed", exc_info=True)
            signal.raise_signal(signal.SIGTERM)
        finally:
            for task in self.probes.values():
                task.cancel()
            await asyncio.gather(*self.probes.values(), return_exceptions=True)

    async def _run(self) -> None:
        control_at = self.fleet.clock() + CONTROL_S
        while True:
            await asyncio.sleep(min(TICK_S, self.poll_s))
            now = self.fleet.clock()
            self.proxy.sweep()
            self._probe_due(now)
            await self.pins.tick(now)
            if self.proxy.router.redis_url is not None:
                self._hear_others()
            if now >= control_at:
                control_at = now + CONTROL_S
                self._control()
            self.fleet.refresh()

    def _probe_due(self, now: float) -> None:
        known = set(self.fleet.engines())
        for engine in self.due.keys() - known:
            del self.due[engine]
            self.probes.pop(engine).cancel()
        for engine in known:
            task = self.probes.get(engine)
            if now >= self.due.get(engine, 0.0) and (task is None or task.done()):
                self.due[engine] = now + self.poll_s
                self.probes[engine] = asyncio.ensure_future(self.probe(engine))

    async def probe(self, engine: Engine) -> None:
        """One look at an engine. Enough failures in a row open its breaker and take its turns back."""
        began = self.fleet.clock()
        try:
            await asyncio.wait_for(self._look(engine), 2 * self.poll_s)
        except asyncio.TimeoutError:
            if not self._excused(engine, began):
                self._failed(engine, f"no answer to a probe within {2 * self.poll_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            if not (isinstance(error, aiohttp.ClientResponseError) and self._excused(engine, began)):
                self._failed(engine, f"probe: {error}")
        else:
            self.fleet.answers(engine)

    def _excused(self, engine: Engine, began: float) -> bool:
        """Not dead: it is applying an update, or it has answered somebody since the probe was sent."""
        updating = engine.state == "updating" and began - engine.updating_since < UPDATE_GRACE_S
        return updating or engine.progress > began

    def _failed(self, engine: Engine, reason: str) -> None:
        if self.fleet.failed(engine):
            log.warning("%s (%s): breaker open: %s", engine.name, engine.url, reason)
        if engine.breaker == "open":  # by this probe, or before it by turns that failed
            for turn in engine.in_flight:
                self.proxy.interrupt(turn, TurnLost(reason))

    async def _look(self, engine: Engine) -> None:
        await asyncio.gather(self.read_version(engine), self._read_load(engine))
        async with self.proxy.http.get(engine.address("/health")) as reply:
            reply.raise_for_status()

    async def read_version(self, engine: Engine) -> None:
        """Ask the engine which weights it serves."""
        answer = await self._json(engine, "/model_info") or await self._json(engine, "/get_model_info")
        if answer is not None:
            answered = gate.parse(answer.get("weight_version"))
            if answered != engine.answered:
                engine.answered = answered
                self.fleet.believe(engine)

    async def _read_load(self, engine: Engine) -> None:
        began = self.fleet.clock()
        answer = await self._json(engine, "/v1/loads?include=core")
        loads = answer.get("loads") if answer is not None else None
        if not isinstance(loads, list) or not all(isinstance(load, dict) for load in loads):
            engine.missing_since = None
            return
        engine.running = int(sum(_number(load, "num_running_reqs") for load in loads))
        engine.queued = int(sum(_number(load, "num_waiting_reqs") for load in loads))
        engine.kv_use = max((_number(load, "token_usage") for load in loads), default=0.0)
        missing = sum(turn.progress < began for turn in engine.in_flight) - engine.running - engine.queued
        stamps = tuple(load.get("timestamp") for load in loads)
        stale = stamps == engine.load_stamps and None not in stamps  # its scheduler is busy with something else
        engine.load_stamps = stamps
        if missing <= 0 or stale or engine.state == "updating":
            engine.missing_since = None
        elif engine.missing_since is None:
            engine.missing, engine.missing_since = missing, began
        else:
            engine.missing = min(engine.missing, missing)
        self.proxy.take_back_lost(engine)

    async def _json(self, engine: Engine, path: str) -> dict[str, Any] | None:
        """The engine's answer; None for one that is no JSON object."""
        async with self.proxy.http.get(engine.address(path)) as reply:
            text = await reply.read()
        try:
            answer = json.loads(text) if reply.status == 200 else None
        except (ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None

    def _control(self) -> None:
        """Once per period: correct each pool's live factor by its load."""
        for pool in self.fleet.pools.values():
            if not pool.engines:
                continue
            engines = list(pool.engines.values())
            load = capacity.Load(
                active=self.fleet.pool_active(pool),
                running=sum(engine.running for engine in engines),
                queued=sum(engine.queued for engine in engines),
                kv_use=max(engine.kv_use for engine in engines),
                turn_p90_s=pool.latencies.quantile(0.9),
            )
            target_s = self.proxy.router.turn_latency_target_s
            before, pool.factor = pool.factor, capacity.adjust(pool.factor, pool.slots or 1, load, target_s)
            pool.latencies.fade(FADE)
            if abs(pool.factor - before) > 0.05:
                log.info("pool %s: live capacity %.0f%% of its slots (%s)", pool.name, 100 * pool.factor, load)

    def _hear_others(self) -> None:
        """Engines, views and drains that were told to another router."""
        self.fleet.recall(self.pins.facts)
        told = self.pins.facts.get("engine", {})
        for engine in [engine for engine in self.fleet.engines() if engine.name not in told]:
            self.fleet.remove(engine)


def _number(load: dict[str, Any], key: str) -> float:
    value = load.get(key)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else 0
