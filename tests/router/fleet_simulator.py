"""A fleet in simulated time: sessions of growing context on pools of limited speed and KV cache.

Turn by turn: a session thinks (its tool runs), asks, and waits for `tokens / speed` seconds, where an engine's speed
per request falls with its batch, and steeply once the contexts on it exceed its KV cache (they are evicted and
prefilled again). Clients keep a fixed number of sessions going, as a rollout does.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from miles_mixprec.router import assignment, capacity


@dataclass(frozen=True)
class Kind:
    """A pool: its engines, their slots, tokens/s of a lone request, contexts (tokens) that fit an engine's cache."""

    engines: int
    slots: int
    speed: float
    kv_tokens: float

    @property
    def total(self) -> int:
        return self.engines * self.slots


@dataclass
class PoolState:
    kind: Kind
    factor: float = 1.0
    sessions: int = 0
    running: int = 0
    context: float = 0.0
    latencies: capacity.Latencies = field(default_factory=capacity.Latencies)

    @property
    def kv_use(self) -> float:
        return self.context / (self.kind.engines * self.kind.kv_tokens)

    def speed(self) -> float:
        batch = self.running / self.kind.total
        return self.kind.speed / (1 + batch) / (1 + 8 * max(0.0, self.kv_use - 0.9))


@dataclass
class Session:
    key: str
    pool: str
    turns_left: int
    growth: float
    context: float = 4000.0


@dataclass
class Fleet:
    """`adaptive`: the router's own rules. Otherwise: hashed by declared slots, nothing measured, nobody refused."""

    kinds: Mapping[str, Kind]
    adaptive: bool
    concurrent: int
    target_s: float = 10.0
    seed: int = 0
    now: float = 0.0
    refused: int = 0
    ended: int = 0
    lived: dict[str, float] = field(default_factory=dict)  # session-seconds per pool, after `since`
    since: float = 0.0
    late: dict[str, list[float]] = field(default_factory=dict)  # turn latencies after `since`

    def run(self, hours: float, observe_last: float) -> Fleet:
        """Play `hours`; record what happens in the last `observe_last` hours."""
        self.rng = random.Random(self.seed)
        self.end = 3600 * hours
        self.since = self.end - 3600 * observe_last
        self.pools = {name: PoolState(kind) for name, kind in self.kinds.items()}
        self.late = {name: [] for name in self.kinds}
        self.lived = dict.fromkeys(self.kinds, 0.0)
        self.order = itertools.count()
        self.events: list[tuple[float, int, str, Session | None]] = []
        for i in range(self.concurrent):
            self._at(i * 0.2, "start", None)
        self._at(30.0, "control", None)
        while self.events:
            self.now, _, what, session = heapq.heappop(self.events)
            if self.now > self.end:
                break
            getattr(self, "_" + what)(session)
        return self

    def _at(self, time: float, what: str, session: Session | None) -> None:
        heapq.heappush(self.events, (time, next(self.order), what, session))

    def _limit(self, pool: PoolState) -> float:
        return pool.kind.total * pool.factor if self.adaptive else math.inf

    def _start(self, _: None) -> None:
        key = f"s{next(self.order)}"
        if self.adaptive:
            sizes = {name: self._limit(pool) for name, pool in self.pools.items()}
            active = {name: pool.sessions for name, pool in self.pools.items()}
            weights = capacity.weights(sizes, {}, active)
        else:
            weights = {name: float(pool.kind.total) for name, pool in self.pools.items()}
        for name in assignment.rank(key, assignment.table(weights)):
            if self.pools[name].sessions < self._limit(self.pools[name]):
                break
        else:
            self.refused += 1
            self._at(self.now + 10.0, "start", None)
            return
        final = (64e3 + 30e3 * self.now / self.end) * math.exp(self.rng.gauss(0, 0.5))
        turns = max(2, int(self.rng.expovariate(1 / 60)))
        session = Session(key, name, turns, (final - 4000) / turns)
        pool = self.pools[name]
        pool.sessions += 1
        pool.context += session.context
        self._at(self.now + self.rng.uniform(0, 10), "ask", session)

    def _ask(self, session: Session) -> None:
        pool = self.pools[session.pool]
        pool.running += 1
        seconds = 400 * math.exp(self.rng.gauss(0, 0.6)) / pool.speed()
        pool.latencies.add(seconds)
        if self.now > self.since:
            self.late[session.pool].append(seconds)
            self.lived[session.pool] += seconds
        self._at(self.now + seconds, "answer", session)

    def _answer(self, session: Session) -> None:
        pool = self.pools[session.pool]
        pool.running -= 1
        session.turns_left -= 1
        session.context += session.growth
        pool.context += session.growth
        if session.turns_left:
            think = self.rng.uniform(1, 9)
            if self.now > self.since:
                self.lived[session.pool] += think
            self._at(self.now + think, "ask", session)
        else:
            pool.sessions -= 1
            pool.context -= session.context
            self.ended += 1
            self._at(self.now, "start", None)

    def _control(self, _: None) -> None:
        for pool in self.pools.values():
            load = capacity.Load(
                active=pool.sessions,
                running=pool.running,
                kv_use=min(1.0, pool.kv_use),
                turn_p90_s=pool.latencies.quantile(0.9),
            )
            pool.factor = capacity.adjust(pool.factor, pool.kind.total, load, self.target_s)
            pool.latencies.fade(0.95**6)
        self._at(self.now + 30.0, "control", None)

    def p90(self, name: str) -> float:
        times = sorted(self.late[name])
        return times[int(0.9 * len(times))]
