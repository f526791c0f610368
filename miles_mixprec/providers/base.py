"""What every source of engines offers, and the rule for when a run may start."""

from __future__ import annotations

import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from miles_mixprec.config import Fleet
from miles_mixprec.errors import EngineError


@dataclass(frozen=True)
class Engine:
    """One SGLang server of a pool."""

    pool: str
    index: int
    url: str | None  # None until it has been placed

    @property
    def name(self) -> str:
        return f"{self.pool}/{self.index}"


@dataclass(frozen=True)
class Health:
    """`starting` may still become `ready` (weights are loading, capacity has not arrived); `failed` will not."""

    state: Literal["starting", "ready", "failed"]
    detail: str = ""


class Provider(ABC):
    """Engines of one fleet. Launching never waits for readiness; `await_engines` does."""

    fleet: Fleet

    @abstractmethod
    def list(self) -> Sequence[Engine]:
        """Engines asked for and not stopped, whatever their health, ordered by pool and index."""

    @abstractmethod
    def health(self, name: str) -> Health:
        """State of engine `<pool>/<index>` now. Raises EngineError if unknown."""

    @abstractmethod
    def stop(self) -> None:
        """Stop everything that this provider started. Repeatable."""

    @abstractmethod
    def _resize(self, pool: str, engines: int) -> None: ...

    def launch(self, pool: str) -> Sequence[Engine]:
        """Start the engines that the fleet states for `pool`."""
        return self.resize(pool, self.fleet.pools[pool].engines)

    def resize(self, pool: str, engines: int) -> Sequence[Engine]:
        """Start or stop engines (highest index first) until `pool` has that many; return them."""
        self._resize(pool, engines)
        return self._engines_of(pool)

    def address(self, name: str) -> str:
        """Base URL of engine `<pool>/<index>`. Raises EngineError if unknown or not yet placed."""
        engine = self._engine(name)
        if engine.url is None:
            raise EngineError(f"engine {name}: not placed yet ({self.health(name).detail}); wait for it")
        return engine.url

    def _engine(self, name: str) -> Engine:
        engines = {engine.name: engine for engine in self.list()}
        if name not in engines:
            raise EngineError(f"engine {name}: not in use; this provider has {', '.join(engines) or 'none'}")
        return engines[name]

    def _engines_of(self, pool: str) -> Sequence[Engine]:
        return [engine for engine in self.list() if engine.pool == pool]


def await_engines(
    provider: Provider,
    *,
    timeout_s: float = 600.0,
    poll_s: float = 0.5,
    on_ready: Callable[[Engine], None] = lambda engine: None,
) -> Sequence[Engine]:
    """Wait for every engine, at most `timeout_s`, then only for the `min_engines` of each pool; return the ready ones.

    Capacity that has not arrived by then joins later. Raises EngineError at once when an engine fails, and at the
    deadline when a pool is short of `min_engines` or nothing is ready at all.
    """
    deadline = time.monotonic() + timeout_s
    ready: dict[str, Engine] = {}
    while True:
        engines = provider.list()
        states = {engine.name: provider.health(engine.name) for engine in engines}
        for engine in engines:
            state = states[engine.name].state
            if state == "failed":
                raise EngineError(states[engine.name].detail)
            if state == "ready" and engine.url is not None and engine.name not in ready:
                ready[engine.name] = engine
                on_ready(engine)
        if len(ready) == len(engines):
            return list(ready.values())
        if time.monotonic() >= deadline:
            break
        time.sleep(poll_s)
    for name, pool in provider.fleet.pools.items():
        arrived = sum(engine.pool == name for engine in ready.values())
        if arrived < pool.min_engines or not ready:
            waiting = next(engine.name for engine in engines if engine.pool == name and engine.name not in ready)
            detail = states[waiting].detail or "still starting"
            raise EngineError(
                f"pool {name}: {arrived} of {pool.min_engines or 1} engines needed were ready after {timeout_s:g} s "
                f"({waiting}: {detail}); allow more time or lower fleet.pools.{name}.min_engines"
            )
    return list(ready.values())


def responds(url: str) -> bool:
    """Whether the server at `url` says within 2 s that it is healthy."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2.0) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
