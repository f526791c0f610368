"""The fleet as it is now: pools, engines, their load, breakers and versions, and where a new session goes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from multidict import istr
from yarl import URL

from miles_mixprec.config import Fleet
from miles_mixprec.headers import ENGINE, POOL, VIEW, WEIGHT_VERSION
from miles_mixprec.router import assignment, capacity, gate
from miles_mixprec.router.failures import Conflict, NoPool, Refused

if TYPE_CHECKING:
    from miles_mixprec.router.proxy import Turn

log = logging.getLogger(__name__)

FAILURES_TO_OPEN = 3  # consecutive, without a byte of progress between them
COOL_DOWN_S = (5.0, 60.0)  # first and longest time that a breaker stays open
STATES = ("serving", "updating", "draining")


@dataclass(eq=False)
class Engine:
    """One replica. Counters balance: sent = returned + failed + in flight."""

    name: str
    pool: Pool
    url: str
    slots: int
    joined: float  # loop time from which it ramps in; -inf: it was there from the start
    state: str = "serving"
    claimed: int | None = None  # version according to its sidecar
    answered: int | None = None  # version according to itself
    foreign: int | None = None  # version left over from another run: not accepted until it changes
    version: int = 0
    breaker: str = "closed"  # closed | open | half-open
    failures: int = 0
    cool_down_s: float = field(default_factory=lambda: COOL_DOWN_S[0])
    retry_at: float = 0.0
    progress: float = 0.0  # loop time of the last byte or answer
    updating_since: float = 0.0
    load_stamps: tuple[object, ...] = ()  # when its schedulers last wrote down their load
    missing: int = 0  # turns in flight that are not among those it says it is working on
    missing_since: float | None = None
    running: int = 0
    queued: int = 0
    kv_use: float = 0.0
    in_flight: set[Turn] = field(default_factory=set)
    sent: int = 0
    returned: int = 0
    failed: int = 0
    lost: int = 0  # of the failed: replies that never came although the engine was done

    @property
    def id(self) -> str:
        return self.name.replace("/", "-")

    @property
    def usable(self) -> bool:
        """Alive as far as known; updating or draining engines are. Half open: for one turn at a time."""
        return self.breaker == "closed" or (self.breaker == "half-open" and not self.in_flight)

    def accepts(self, floor: int) -> bool:
        """May start a turn now, for a request that needs at least version `floor`."""
        return self.state != "updating" and self.usable and self.foreign is None and self.version >= floor

    def registration(self) -> list[str | int | None]:
        """What `LiveFleet.recall` needs to know it again."""
        return [self.url, self.pool.name, self.pool.view, self.slots, self.state, self.claimed]

    def attribution(self, version: int) -> dict[istr, str]:
        """Reply headers that say where a turn was sampled; see docs/architecture.md, "Attribution"."""
        pool = self.pool
        return {POOL: pool.name, ENGINE: self.name, VIEW: pool.view, WEIGHT_VERSION: str(version)}

    def address(self, path: str) -> URL:
        return URL(self.url + path, encoded=True)


@dataclass(eq=False)
class Pool:
    """Engines of one precision and kernel family."""

    name: str
    view: str
    slots_per_engine: int
    max_share: float = 1.0
    min_engines: int = 0
    declared: bool = False  # by the configuration; others vanish with their last engine
    draining: bool = False
    factor: float = 1.0
    engines: dict[str, Engine] = field(default_factory=dict)
    latencies: capacity.Latencies = field(default_factory=capacity.Latencies)
    turns: int = 0
    turn_seconds: float = 0.0
    share: float = 0.0
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def breaker(self) -> str:
        """Open when every engine's is; half-open when the best engine is."""
        states = {engine.breaker for engine in self.engines.values()}
        return next((state for state in ("closed", "half-open") if state in states), "open")

    @property
    def slots(self) -> int:
        return sum(engine.slots for engine in self.engines.values() if engine.breaker != "open")

    def answered(self, seconds: float) -> None:
        """A turn came back after `seconds`."""
        self.turns += 1
        self.turn_seconds += seconds
        self.latencies.add(seconds)

    def wake(self) -> None:
        """Something that a waiting request may care about has changed."""
        self.woken.set()
        self.woken = asyncio.Event()

    async def change(self, timeout_s: float) -> None:
        """Return at the next `wake`, or after `timeout_s`."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.woken.wait(), timeout_s)


class LiveFleet:
    """Pools and engines by name, published views, and the assignment tables made of them.

    `active` gives the live sessions of each engine by name. Everything here runs on one event loop and never waits.
    """

    def __init__(self, fleet: Fleet, active: Mapping[str, int], clock: Callable[[], float]) -> None:
        self.active = active
        self.clock = clock
        self.views: dict[str, gate.View] = {}
        self.urls: dict[str, Engine] = {}
        self.pools = {
            name: Pool(name, pool.view, pool.slots_per_engine, pool.max_share, pool.min_engines, declared=True)
            for name, pool in fleet.pools.items()
        }
        self.declared_slots = fleet.slots
        self.declared_urls = {url.rstrip("/"): name for name, pool in fleet.pools.items() for url in pool.urls}
        self._tables: tuple[assignment.Table, assignment.Table] = ((), ())
        self._claims_left = 0.0
        self._left_out: set[str] = set()  # of what was remembered, by address

    # -- registration -------------------------------------------------------------------------------------------

    def engines(self) -> Iterator[Engine]:
        return itertools.chain.from_iterable(pool.engines.values() for pool in self.pools.values())

    def register(
        self,
        url: str,
        pool: str | None,
        view: str | None = None,
        *,
        name: str | None = None,
        slots: int | None = None,
        state: str | None = None,
        version: int | None = None,
    ) -> Engine:
        """Add an engine, or bring a known one (by name, else by URL) up to date; what is None stays as it is.

        Raises Conflict rather than guess a precision, Refused for a name that is not of the pool.
        """
        home = self._pool_of(url, pool, view, slots)
        if name is not None and not re.fullmatch(re.escape(home.name) + r"/[0-9]{1,6}", name):
            raise Refused(f"engine {name!r}: engines of pool {home.name} are named {home.name}/0, {home.name}/1, ...")
        known = self.urls.get(url)
        if name is not None:
            engine = home.engines.get(name)
        else:
            engine = known if known is not None and known.pool is home else None
        if known is not None and known is not engine:
            self.remove(known)  # the address has a new owner
        self.pools[home.name] = home  # new, or removed with its last engine just now
        if engine is None:
            name = name or next(n for i in itertools.count() if (n := f"{home.name}/{i}") not in home.engines)
            at_work = any(self.active.get(other.name, 0) for other in self.engines())
            joined = self.clock() if at_work else -math.inf
            engine = home.engines[name] = Engine(name, home, url, slots or home.slots_per_engine, joined)
        elif engine.url != url:  # it came back at another address
            del self.urls[engine.url]
            engine.url, engine.joined = url, self.clock()
            self.close_breaker(engine)
        self.urls[url] = engine
        if slots is not None:
            engine.slots = slots
        if state is not None and state != engine.state:
            engine.state, engine.updating_since = state, self.clock()
            if state == "updating":
                engine.foreign = None  # whatever it loads now was published by the present run
        if version is not None:
            engine.claimed = version
        self.believe(engine)
        return engine

    def _pool_of(self, url: str, pool: str | None, view: str | None, slots: int | None) -> Pool:
        """The pool that a registration belongs to, perhaps a new one."""
        if pool is None:
            names = list(self.pools)
            pool = self.declared_urls.get(url) or ("default" if not names else names[0] if len(names) == 1 else None)
            if pool is None:
                raise Conflict(
                    f"engine {url} names no pool and the fleet has {len(names)} ({', '.join(names)}); register it "
                    "with POST /workers and a pool, or list it under fleet.pools.<pool>.urls"
                )
        known = self.pools.get(pool) or Pool(pool, view or "bf16", slots or 1)
        if view is not None and view != known.view:
            raise Conflict(f"engine {url}: view {view}, but pool {pool} serves {known.view}; a pool has one view")
        return known

    def believe(self, engine: Engine) -> None:
        """Recompute the version that the gate uses and let waiting requests look again."""
        engine.version = gate.effective(engine.claimed, engine.answered)
        if engine.foreign is not None and engine.version != engine.foreign:
            engine.foreign = None
        self.changed(engine.pool)

    def remove(self, engine: Engine) -> None:
        """Forget an engine. Its turns in flight may finish; nothing new goes there."""
        del engine.pool.engines[engine.name], self.urls[engine.url]
        if not engine.pool.engines and not engine.pool.declared:
            del self.pools[engine.pool.name]
        self.changed(engine.pool)

    def announce(self, view: str, version: int, run: str | None) -> None:
        """A new version of `view` is published.

        Several announce the same thing, so within a run the newest counts and older ones are heard too late. Another
        run may start lower, but a run that another one has followed never returns: raises Conflict.
        """
        known = self.views.setdefault(view, gate.View(run=run))
        if run in known.former:
            raise Conflict(f"view {view}: run {run} is over, run {known.run} has followed it; use a new run id")
        engines = [engine for engine in self.engines() if engine.pool.view == view]
        if run == known.run:
            known.version = max(known.version, version)
        else:
            known.former = [*known.former[-63:], known.run]
            known.version, known.run = version, run
            for engine in engines:
                if engine.version > version:
                    engine.foreign = engine.version
        for engine in engines:
            engine.pool.wake()

    def recall(self, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over views, engines and drained pools that this router learned before a restart, or another one did."""
        for view, (version, run, former) in facts.get("view", {}).items():
            known = self.views.get(view)
            if known is None or known.run in former or (known.run == run and known.version < version):
                self.announce(view, version, run)
                self.views[view].former = former
        for name, fact in facts.get("engine", {}).items():
            url, pool, view, slots, state, version = fact
            engine = self.urls.get(url)
            if engine is None or engine.registration() != fact:
                try:
                    self.register(url, pool, view, name=name, slots=slots, state=state, version=version)
                except Refused as refusal:  # remembered from another configuration
                    if url not in self._left_out:
                        log.warning("%s is left out: %s", name, refusal)
                    self._left_out.add(url)
        for drained in self.pools.values():
            drained.draining = drained.name in facts.get("drain", {})

    def newest(self, view: str) -> int:
        known = self.views.get(view)
        return 0 if known is None else known.version

    # -- breakers -----------------------------------------------------------------------------------------------

    def succeeded(self, engine: Engine, now: float) -> None:
        """A reply came back whole."""
        engine.progress = now
        engine.failures = 0
        if engine.breaker != "closed":
            engine.joined = now  # ramps in again
            self.close_breaker(engine)

    def close_breaker(self, engine: Engine) -> None:
        engine.breaker, engine.failures, engine.cool_down_s = "closed", 0, COOL_DOWN_S[0]
        self.changed(engine.pool)

    def failed(self, engine: Engine) -> bool:
        """A connection, probe or turn failed. True if that opened the breaker."""
        engine.failures += 1
        if engine.breaker == "open" or (engine.breaker == "closed" and engine.failures < FAILURES_TO_OPEN):
            return False
        if engine.breaker == "half-open":
            engine.cool_down_s = min(2 * engine.cool_down_s, COOL_DOWN_S[1])
        engine.breaker = "open"
        engine.retry_at = self.clock() + engine.cool_down_s
        self.changed(engine.pool)
        return True

    def answers(self, engine: Engine) -> None:
        """A health probe succeeded: an open breaker that has cooled down lets one turn through."""
        if engine.breaker == "closed":
            engine.failures = 0
        elif engine.breaker == "open" and self.clock() >= engine.retry_at:
            engine.breaker = "half-open"
            self.changed(engine.pool)

    def changed(self, pool: Pool) -> None:
        self._claims_left = 0.0
        pool.wake()

    # -- assignment ---------------------------------------------------------------------------------------------

    def limit(self, engine: Engine) -> int:
        """Sessions that the engine may hold now."""
        if engine.breaker == "half-open":
            return 1
        return max(1, int(engine.slots * engine.pool.factor * capacity.ramp(self.clock() - engine.joined)))

    def pool_active(self, pool: Pool) -> int:
        return sum(self.active.get(name, 0) for name in pool.engines)

    def refresh(self) -> None:
        """Rebuild the tables of pools from live capacity."""
        room = {
            pool.name: float(sum(self.limit(engine) for engine in pool.engines.values() if _assignable(engine)))
            for pool in self.pools.values()
            if not pool.draining
        }
        active = {name: self.pool_active(self.pools[name]) for name in room}
        caps = {name: self.pools[name].max_share for name in room}
        shares = capacity.shares(room, caps)
        for pool in self.pools.values():
            pool.share = shares.get(pool.name, 0.0)
        self._tables = assignment.table(capacity.weights(room, caps, active)), assignment.table(room)
        self._claims_left = max(1.0, capacity.HEADROOM * sum(room.values()) / 2)

    def candidates(self, key: str) -> Iterator[tuple[Engine, int]]:
        """Engines for a new session with their limits, best first. Raises NoPool if no pool takes sessions.

        First the pools that are short of their share, then the rest: a session that would otherwise be refused may
        overfill a share, never a limit.
        """
        self._claims_left -= 1
        if self._claims_left < 0:
            self.refresh()
        wanted, able = self._tables
        if not able:
            raise NoPool("no pool takes new sessions: all are draining, unreachable or still starting; see GET /fleet")
        first = assignment.best(key, wanted)
        if first is not None:
            yield from self.engines_for(key, self.pools[first])
        for name in dict.fromkeys(assignment.rank(key, wanted) + assignment.rank(key, able)):
            if name != first:
                yield from self.engines_for(key, self.pools[name])

    def engines_for(self, key: str, pool: Pool) -> Iterator[tuple[Engine, int]]:
        """The pool's engines for `key` with their limits, best first."""
        limits = {engine.name: self.limit(engine) for engine in pool.engines.values() if _assignable(engine)}
        for name in assignment.rank(key, assignment.table(limits)):
            yield pool.engines[name], limits[name]


def _assignable(engine: Engine) -> bool:
    return engine.breaker != "open" and engine.state != "draining"
