"""One turn through the router: pin, place, send, pass the reply back.

Bodies are never parsed on this path. A request is kept until its reply starts, so a turn whose engine dies, hangs or
drops it is sent again, to another engine of the same pool. Once reply bytes have gone to the client nothing is sent
again: a reply that then breaks off is broken off towards the client too, never completed by guesswork.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import uuid
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from miles_mixprec.config import Router
from miles_mixprec.errors import EngineError
from miles_mixprec.headers import MIN_VERSION
from miles_mixprec.router import gate
from miles_mixprec.router.failures import Deadline, EngineFailed, Full, NoPool, PoolLost, Refused, VersionGate
from miles_mixprec.router.security import Access, session_key, to_client, to_engine
from miles_mixprec.router.sessions import MemoryPins, Pin
from miles_mixprec.router.state import Engine, LiveFleet

log = logging.getLogger(__name__)

HEARTBEAT_PATHS = frozenset({"/generate", "/v1/chat/completions", "/v1/completions"})
RETRYABLE = frozenset({502, 503, 504})
SMALL_REPLY = 2 * 2**20  # bytes; read whole, so that a torn one can be asked for again
RETRY_PAUSE_S = 0.1  # before the same engine is tried again, doubling
LEAST_RETRIES = 100.0  # that a rested budget holds, or one per slot of the fleet
LOST_AFTER_S = 20.0  # that a turn must be missing from what its engine says it is doing


class TurnLost(EngineError):
    """An attempt ended without a whole reply; another engine of the pool may be asked."""


@dataclass(eq=False, slots=True)
class Turn:
    """A request on its way. `engine` is where it is now; `commit` the reply once anything of it has been sent."""

    request: web.BaseRequest
    body: bytes
    pin: Pin | None
    floor: int
    started: float
    task: asyncio.Task[Any]
    engine: Engine | None = None
    version: int = 0  # the engine's, when the turn was sent
    attempts: int = 0
    sent_at: float = 0.0
    progress: float = 0.0  # loop time at which it was sent or a byte of its reply came
    answered: bool = False  # reply headers have come
    commit: web.StreamResponse | None = None
    beating: asyncio.Task[None] | None = None
    last_beat: float = 0.0
    interrupt: Exception | None = None
    wants_heartbeat: bool | None = None
    broken: bool = False


@dataclass
class Hops:
    """What came in and what went out, per hop; the differences are what is in flight or was lost."""

    received: int = 0
    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by kind
    disconnected: int = 0
    broken: int = 0  # replies broken off after they had started
    retried: int = 0
    heartbeats: int = 0


class Proxy:
    """The data path of one router."""

    http: aiohttp.ClientSession  # to the engines; from when the application starts

    def __init__(self, router: Router, fleet: LiveFleet, pins: MemoryPins, access: Access) -> None:
        self.router = router
        self.fleet = fleet
        self.pins = pins
        self.access = access
        self.hops = Hops()
        self.turns: set[Turn] = set()
        self.retries_left = self.retry_cap = max(LEAST_RETRIES, fleet.declared_slots)
        self._anonymous = (f"-{uuid.uuid4().hex[:12]}-{i}" for i in itertools.count())
        self._now = fleet.clock

    # -- entry points -------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A turn of a session (`X-SMG-Routing-Key`), or of a session of its own when it names none."""
        return await self._serve(request, session=True)

    async def inform(self, request: web.Request) -> web.StreamResponse:
        """A question that any engine can answer; the session's own engine when it names one."""
        return await self._serve(request, session=False)

    async def _serve(self, request: web.Request, *, session: bool) -> web.StreamResponse:
        hops = self.hops
        hops.received += 1
        try:
            self.access.check(request)
            key = session_key(request)
            if not request.raw_path.startswith("/"):
                raise Refused("the request target must be a path; this is no forward proxy")
            body = await request.read()
            pin = await self._pin(key) if session or key else None
            task = asyncio.current_task()
            assert task is not None
            turn = Turn(request, body, pin, gate.parse(request.headers.get(MIN_VERSION)) or 0, self._now(), task)
            self.turns.add(turn)
            if pin is not None:
                self.pins.enter(pin, turn.started)
            try:
                response = await self._attempts(turn)
            finally:
                self.turns.discard(turn)
                if pin is not None:
                    self.pins.leave(pin, self._now())
                    if not pin.lasting:
                        await self.pins.release(pin.key)
            if turn.broken:
                hops.broken += 1
            else:
                hops.answered += 1
            return response
        except Refused as refusal:
            hops.refused[refusal.kind] += 1
            return refusal.response()
        except web.HTTPException:  # aiohttp's own: a body beyond its limit
            hops.refused["http"] += 1
            raise
        except asyncio.CancelledError:
            hops.disconnected += 1
            raise

    # -- placing ------------------------------------------------------------------------------------------------

    async def _pin(self, key: str | None) -> Pin:
        """The session's pin, made now if it is new. Raises Full, NoPool, StoreAway."""
        pin = None if key is None else await self.pins.find(key)
        if pin is None:
            name = key or next(self._anonymous)
            pin = await self.pins.claim(name, self.fleet.candidates(name), self._now(), lasting=key is not None)
        if pin is None:
            raise Full("every slot of the fleet holds a live session; retry later, or end sessions that are over")
        return pin

    async def _place(self, turn: Turn, tried: set[str]) -> Engine:
        """The engine for the turn's next attempt: the pinned one, else another of its pool, waiting as configured.

        While the pinned engine applies an update or lags behind, the turn waits for it, up to half of `gate_wait_s`,
        because its KV cache holds the session. Raises PoolLost, VersionGate.
        """
        pin = turn.pin
        if pin is None:
            return self._any_engine(turn, tried)
        began, limit = self._now(), self.router.gate_wait_s
        while True:
            pool = self.fleet.pools.get(pin.pool)
            if pool is None or pool.breaker == "open":
                await self.pins.give_up(pin)
                raise PoolLost(
                    f"pool {pin.pool} has no usable engine; session {pin.key} is lost, for it never moves to another "
                    "pool; start a new session",
                    pool=pin.pool,
                )
            floor = gate.floor(self.router.gate, self.router.gate_lag, self.fleet.newest(pool.view), turn.floor)
            home = pool.engines.get(pin.engine)
            if home is not None and (home.name in tried or home.state == "draining"):
                home = None  # not worth waiting for
            if home is not None and home.accepts(floor):
                return home
            waited, stays = self._now() - began, home is not None and home.usable
            ready = [engine for engine in pool.engines.values() if engine.accepts(floor)]
            fresh = [e for e in ready if e.name not in tried and (e.state == "serving" or e.name == pin.engine)]
            if fresh and not (stays and waited < limit / 2):
                engine = self._another(pin, fresh)
                if engine.name != pin.engine:
                    await self.pins.move(pin, engine)
                return engine
            if ready and tried and not stays:  # nothing but engines that failed this turn: give them a moment
                await pool.change(RETRY_PAUSE_S * 2**turn.attempts)
                tried.clear()
                continue
            if waited >= limit:
                raise VersionGate(
                    f"pool {pool.name}: no engine at weight version {floor} within {limit:g} s; retry, or look at the "
                    "engines' sidecars",
                    pool=pool.name,
                    view=pool.view,
                    required=floor,
                    engines={engine.name: engine.version for engine in pool.engines.values()},
                )
            await pool.change(max((limit / 2 if waited < limit / 2 else limit) - waited, 0.01))

    def _another(self, pin: Pin, fresh: list[Engine]) -> Engine:
        """In rendezvous order, the first with a free slot; a live session is never refused for lack of one."""
        able = {engine.name: engine for engine in fresh}
        for engine, limit in self.fleet.engines_for(pin.key, fresh[0].pool):
            if engine.name in able and self.pins.active[engine.name] < limit:
                return engine
        return min(fresh, key=lambda engine: self.pins.active[engine.name] / engine.slots)

    def _any_engine(self, turn: Turn, tried: set[str]) -> Engine:
        able = [e for e in self.fleet.engines() if e.breaker == "closed" and e.name not in tried]
        if not able:
            raise NoPool("no engine answers; see GET /fleet")
        return min(able, key=lambda engine: (engine.state == "updating", len(engine.in_flight)))

    # -- sending ------------------------------------------------------------------------------------------------

    async def _attempts(self, turn: Turn) -> web.StreamResponse:
        tried: set[str] = set()
        self.retries_left = min(self.retry_cap, self.retries_left + 0.1)
        while True:
            engine = await self._place(turn, tried)
            turn.attempts += 1
            try:
                return await self._exchange(turn, engine)
            except (TurnLost, Deadline) as failure:
                if turn.beating is not None:
                    await asyncio.wait((turn.beating,))  # it may be about to begin the reply
                if turn.commit is not None:
                    return self._break_off(turn)
                if isinstance(failure, Deadline):
                    raise
                if not self._may_retry(turn):
                    raise EngineFailed(f"{engine.name}: {failure}; given up after {turn.attempts} attempts") from None
                self.retries_left -= 1
                self.hops.retried += 1
                tried.add(engine.name)

    def _may_retry(self, turn: Turn) -> bool:
        return turn.attempts < self.router.max_attempts and self.retries_left >= 1

    async def _exchange(self, turn: Turn, engine: Engine) -> web.StreamResponse:
        """Send the turn to `engine` and pass its reply back. Raises TurnLost, Deadline."""
        request = turn.request
        turn.engine, turn.version, turn.answered = engine, engine.version, False
        turn.sent_at = turn.progress = turn.last_beat = self._now()
        engine.sent += 1
        engine.in_flight.add(turn)
        whole = False
        try:
            upstream = await self.http.request(
                request.method,
                engine.address(request.raw_path),
                headers=to_engine(request.headers, authorization=not self.access.guarded),
                data=turn.body or None,
                allow_redirects=False,
            )
            async with upstream:
                turn.answered = True
                turn.progress = engine.progress = self._now()
                if turn.beating is not None:
                    await asyncio.wait((turn.beating,))
                if upstream.status in RETRYABLE and turn.commit is None and self._may_retry(turn):
                    raise self._lost(engine, f"status {upstream.status}")
                response = await self._reply(turn, engine, upstream)
            whole = True
            return response
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise self._lost(engine, f"{type(error).__name__}: {error}") from None
        except asyncio.CancelledError:
            if turn.interrupt is None:
                raise
            reason, turn.interrupt = turn.interrupt, None
            if sys.version_info >= (3, 11):
                turn.task.uncancel()
            raise reason from None
        finally:
            engine.in_flight.discard(turn)
            if engine.breaker == "half-open":
                engine.pool.wake()
            if whole:
                engine.returned += 1
            else:
                engine.failed += 1

    async def _reply(self, turn: Turn, engine: Engine, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        if turn.commit is not None and upstream.status != 200:
            raise self._lost(engine, f"status {upstream.status} after heartbeats had begun")
        headers = to_client(upstream.headers)
        if upstream.status in RETRYABLE:
            headers.setdefault("Retry-After", "1")  # the engine's trouble, not the end of the session
        if turn.pin is not None:
            headers.update(engine.attribution(turn.version))
        size = upstream.content_length
        if turn.commit is None and size is not None and size <= SMALL_REPLY:
            body = await upstream.read()
            await self._completed(turn, engine, upstream.status)
            return web.Response(status=upstream.status, reason=upstream.reason, headers=headers, body=body)
        response = turn.commit
        if response is None:
            response = turn.commit = web.StreamResponse(
                status=upstream.status, reason=upstream.reason, headers=headers
            )
            response.content_length = size
            await _client_takes(response.prepare(turn.request))
        async for chunk in upstream.content.iter_any():
            turn.progress = engine.progress = self._now()
            await _client_takes(response.write(chunk))
        await self._completed(turn, engine, upstream.status)
        await _client_takes(response.write_eof())
        return response

    async def _completed(self, turn: Turn, engine: Engine, status: int) -> None:
        if status in RETRYABLE:
            self._engine_failed(engine)
            return
        now = self._now()
        self.fleet.succeeded(engine, now)
        if turn.pin is not None and status < 400:
            await self.pins.record(turn.pin, engine.name, turn.version)
            engine.pool.answered(now - turn.sent_at)

    def _engine_failed(self, engine: Engine) -> None:
        if self.fleet.failed(engine):
            log.warning("%s: breaker open after %d failures", engine.name, engine.failures)

    def _lost(self, engine: Engine, reason: str) -> TurnLost:
        self._engine_failed(engine)
        return TurnLost(reason)

    def _break_off(self, turn: Turn) -> web.StreamResponse:
        """Close the client's connection in mid-reply: it must see that the reply is torn."""
        assert turn.commit is not None
        turn.broken = True
        if turn.request.transport is not None:
            turn.request.transport.abort()
        return turn.commit

    # -- watching turns in flight -------------------------------------------------------------------------------

    def interrupt(self, turn: Turn, error: Exception) -> None:
        """End the turn's present attempt with `error`."""
        if turn.interrupt is None:
            turn.interrupt = error
            turn.task.cancel()

    def take_back_lost(self, engine: Engine) -> None:
        """Send again the turns of which the engine has known nothing for long enough; called after each look at it.

        How many are missing is known, which ones is not: the oldest are suspected, and on an engine that is still
        busy only those that take twice as long as 99% of the pool's turns.
        """
        now, since = self._now(), engine.missing_since
        if since is None or now - since < LOST_AFTER_S:
            return
        suspects = sorted((t for t in engine.in_flight if t.progress < since), key=lambda turn: turn.sent_at)
        usual = engine.pool.latencies.quantile(0.99)
        for turn in suspects[: engine.missing]:
            if not engine.running + engine.queued or (usual is not None and now - turn.sent_at > 2 * usual):
                engine.lost += 1
                self.interrupt(turn, TurnLost(f"no reply, and the engine knows nothing of it for {now - since:.0f} s"))
        engine.missing_since = None

    def sweep(self) -> None:
        """Deadlines and heartbeats; called every `watch.TICK_S`."""
        now = self._now()
        for turn in self.turns:
            engine = turn.engine
            if engine is None or turn not in engine.in_flight:
                continue
            if now - turn.started > self.router.request_timeout_s:
                self.interrupt(turn, Deadline(f"{engine.name}: no reply within {self.router.request_timeout_s:g} s"))
            elif not turn.answered and now - turn.last_beat >= self.router.heartbeat_s:
                turn.last_beat = now
                self._beat(turn, engine)

    def _beat(self, turn: Turn, engine: Engine) -> None:
        if turn.wants_heartbeat is None:
            turn.wants_heartbeat = turn.request.path in HEARTBEAT_PATHS and not _streams(turn.body)
        if turn.wants_heartbeat and (turn.beating is None or turn.beating.done()):
            self.hops.heartbeats += 1
            turn.beating = asyncio.ensure_future(self._heartbeat(turn, engine))

    async def _heartbeat(self, turn: Turn, engine: Engine) -> None:
        """A blank before the JSON: the connection carries bytes, and parsers skip it (RFC 8259 section 2)."""
        try:
            if turn.commit is None:
                turn.commit = web.StreamResponse(status=200, headers=engine.attribution(turn.version))
                turn.commit.content_type = "application/json"
                await turn.commit.prepare(turn.request)
            await turn.commit.write(b" ")
        except ConnectionError:
            pass  # the client has gone; aiohttp cancels the turn


async def _client_takes(step: Awaitable[object]) -> None:
    """Pass something on to the client. If it has gone, that is not the engine's doing."""
    try:
        await step
    except ConnectionError:
        raise asyncio.CancelledError from None


class _Asked(msgspec.Struct):
    stream: object = False


def _streams(body: bytes) -> bool:
    """The client asked for server-sent events, which need no heartbeat and would not survive one; or may have."""
    try:
        return bool(msgspec.json.decode(body, type=_Asked).stream)
    except (msgspec.DecodeError, RecursionError):
        return True
