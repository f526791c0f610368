"""Pins shared by several routers through Redis.

    <prefix>:pin:<key>        hash   pool, view, engine; expires idle_s after its last turn
    <prefix>:turns:<key>      list   "engine version" of every turn
    <prefix>:live:<engine>    zset   keys of live sessions by the time of their last sign of life
    <prefix>:facts:<kind>     hash   views, engines and drained pools, as JSON

A claim is one script, so two routers cannot pin a session twice or overfill an engine. A pin's pool never changes, so
each router may trust its own copy. While Redis is away, sessions that a router knows go on; new ones are refused.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from miles_mixprec.errors import ConfigError
from miles_mixprec.router.failures import StoreAway
from miles_mixprec.router.sessions import MAX_TURNS, MemoryPins, Pin, Served

if TYPE_CHECKING:
    from miles_mixprec.router.state import Engine

log = logging.getLogger(__name__)

SYNC_S = 1.0
KINDS = ("view", "engine", "drain")

# KEYS: the pin, then each candidate's live set. ARGV: key, now, oldest sign of life that counts, expiry, then for each
# candidate its pool, view, engine and limit. Returns pool, view, engine, or nothing when every candidate is full.
_CLAIM = """
local known = redis.call('HMGET', KEYS[1], 'pool', 'view', 'engine')
if known[1] then return known end
for i = 2, #KEYS do
  local at = 4 * (i - 1) + 1
  redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', ARGV[3])
  if redis.call('ZCARD', KEYS[i]) < tonumber(ARGV[at + 3]) then
    redis.call('HSET', KEYS[1], 'pool', ARGV[at], 'view', ARGV[at + 1], 'engine', ARGV[at + 2])
    redis.call('EXPIRE', KEYS[1], ARGV[4])
    redis.call('ZADD', KEYS[i], ARGV[2], ARGV[1])
    return {ARGV[at], ARGV[at + 1], ARGV[at + 2]}
  end
end
return {}
"""


class RedisPins(MemoryPins):
    """`MemoryPins` is this router's copy; Redis is what counts."""

    def __init__(self, url: str, prefix: str, active_s: float, idle_s: float, most: int) -> None:
        super().__init__(active_s, idle_s, most)
        self.prefix = prefix
        self.redis = Redis.from_url(url, decode_responses=True, socket_timeout=5.0, socket_connect_timeout=5.0)
        self.script = self.redis.register_script(_CLAIM)
        self.synced = 0.0
        self.told = 0  # counts what this router tells Redis, so that older answers do not undo it

    def _key(self, kind: str, name: str) -> str:
        return f"{self.prefix}:{kind}:{name}"

    async def open(self, now: float) -> None:
        try:
            await self._sync_facts()
        except RedisError as error:
            raise ConfigError(
                f"router.redis_url: no answer from Redis ({error}); start it or unset the option"
            ) from error

    async def close(self) -> None:
        await self.redis.aclose()

    async def find(self, key: str) -> Pin | None:
        known = self.pins.get(key)
        if known is not None:
            return known
        with _needed():
            found = await self.redis.hmget(self._key("pin", key), "pool", "view", "engine")
        return self._adopt(key, found)

    def _adopt(self, key: str, found: Sequence[Any]) -> Pin | None:
        if not found or None in found:
            return None
        pool, view, engine = (str(part) for part in found)
        known = self.pins.get(key)  # another request of the session may have been quicker
        return known or self._add(Pin(key, pool, view, engine))

    async def claim(
        self, key: str, candidates: Iterable[tuple[Engine, int]], now: float, *, lasting: bool = True
    ) -> Pin | None:
        if not lasting:
            return await super().claim(key, candidates, now, lasting=False)
        if len(self.pins) >= self.most:
            return None
        choices = list(candidates)
        keys = [self._key("pin", key), *(self._key("live", engine.name) for engine, _ in choices)]
        wall = time.time()
        words: list[Any] = [key, wall, wall - self.active_s, int(self.idle_s) + 1]
        words += itertools.chain.from_iterable((e.pool.name, e.pool.view, e.name, limit) for e, limit in choices)
        with _needed():
            found = await self.script(keys=keys, args=words)
        pin = self._adopt(key, found)
        if pin is not None:
            pin.last = now
        return pin

    async def move(self, pin: Pin, engine: Engine) -> None:
        before = pin.engine
        await super().move(pin, engine)
        if self._kept(pin):
            batch = self.redis.pipeline(transaction=False)
            batch.hset(self._key("pin", pin.key), "engine", engine.name)
            batch.zrem(self._key("live", before), pin.key)
            batch.zadd(self._key("live", engine.name), {pin.key: time.time()})
            await self._send(batch)

    async def release(self, key: str) -> bool:
        pin = self.pins.get(key)
        if pin is not None and not pin.lasting:
            return await super().release(key)
        with _needed():
            engine: Any = pin.engine if pin is not None else await self.redis.hget(self._key("pin", key), "engine")
            known = await super().release(key) or engine is not None
            batch = self.redis.pipeline(transaction=False)
            batch.delete(self._key("pin", key), self._key("turns", key))
            if engine is not None:
                batch.zrem(self._key("live", engine), key)
            await batch.execute()
        return known

    async def give_up(self, pin: Pin) -> None:
        await super().give_up(pin)
        if self._kept(pin):
            batch = self.redis.pipeline(transaction=False)
            batch.zrem(self._key("live", pin.engine), pin.key)
            await self._send(batch)

    async def record(self, pin: Pin, engine: str, version: int) -> None:
        if not self._kept(pin):
            return
        batch = self.redis.pipeline(transaction=False)
        turns, expiry = self._key("turns", pin.key), int(self.idle_s) + 1
        batch.rpush(turns, f"{engine} {version}")
        batch.ltrim(turns, -MAX_TURNS, -1)
        batch.expire(turns, expiry)
        batch.expire(self._key("pin", pin.key), expiry)
        batch.zadd(self._key("live", pin.engine), {pin.key: time.time()})
        await self._send(batch)

    async def turns(self, pin: Pin) -> list[Served]:
        with _needed():
            lines = await self.redis.lrange(self._key("turns", pin.key), 0, -1)
        return [(engine, int(version)) for engine, version in (str(line).split() for line in lines)]

    async def remember(self, kind: str, name: str, value: Any) -> None:
        await super().remember(kind, name, value)
        self.told += 1
        batch = self.redis.pipeline(transaction=False)
        if value is None:
            batch.hdel(self._key("facts", kind), name)
        else:
            batch.hset(self._key("facts", kind), name, json.dumps(value))
        await self._send(batch)
        self.told += 1

    async def tick(self, now: float) -> None:
        for pin in [p for p in self.pins.values() if not p.in_flight and now - p.last > self.active_s]:
            self._sleep(pin)
            del self.pins[pin.key]  # Redis keeps it
        if now - self.synced < SYNC_S:
            return
        self.synced = now
        try:
            await self._sync_facts()
            await self._sync_live()
        except RedisError as error:
            log.warning("Redis does not answer (%s); known sessions go on, new ones are refused", error)

    async def _sync_facts(self) -> None:
        told = self.told
        batch = self.redis.pipeline(transaction=False)
        for kind in KINDS:
            batch.hgetall(self._key("facts", kind))
        answers = await batch.execute()
        if told == self.told:
            for kind, found in zip(KINDS, answers, strict=True):
                self.facts[kind] = {name: json.loads(value) for name, value in found.items()}

    async def _sync_live(self) -> None:
        """Give a sign of life for turns in flight, and count everybody's live sessions."""
        wall, engines = time.time(), list(self.facts.get("engine", {}))
        batch = self.redis.pipeline(transaction=False)
        for pin in self.live:
            if pin.in_flight and pin.lasting:
                batch.zadd(self._key("live", pin.engine), {pin.key: wall})
        for engine in engines:
            batch.zcount(self._key("live", engine), wall - self.active_s, "+inf")
        counts = (await batch.execute())[-len(engines) :] if engines else []
        passing = [pin.engine for pin in self.live if not pin.lasting]
        self.active.clear()
        self.active.update(dict(zip(engines, counts, strict=True)))
        self.active.update(passing)

    async def _send(self, batch: Any) -> None:
        """Tell Redis something it can do without for a moment."""
        try:
            await batch.execute()
        except RedisError as error:
            log.warning("Redis missed an update (%s)", error)


@contextmanager
def _needed() -> Iterator[None]:
    """What a request cannot do without. Raises StoreAway while Redis is away."""
    try:
        yield
    except RedisError as error:
        raise StoreAway(f"Redis does not answer ({error}); retry") from None
