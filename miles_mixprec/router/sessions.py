"""Pins: which pool and engine a session lives on.

A pin's pool never changes. It outlives changes of weights, engines that come and go, and, with Redis, the router.
A session is *live*, and takes one of its engine's slots, while a turn is in flight and for `active_s` after its last
one (its agent is running a tool); then it is *dormant*: it keeps its pin until `idle_s`, but not its slot. A client
that knows its session is over says so (`DELETE /sessions/{key}`), which frees the slot at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_mixprec.router.state import Engine

MAX_TURNS = 4096  # remembered per session

Served = tuple[str, int]
"""Engine name and weight version of a turn."""


@dataclass(eq=False, slots=True)
class Pin:
    key: str
    pool: str
    view: str
    engine: str
    last: float = 0.0  # loop time of its last turn's start or end
    in_flight: int = 0
    live: bool = False
    turns: list[Served] = field(default_factory=list)  # equal neighbours share one tuple


class MemoryPins:
    """Pins of one router, in memory; also the local side of `RedisPins`.

    `active` counts live sessions by engine name.
    """

    def __init__(self, active_s: float, idle_s: float, most: int) -> None:
        self.active_s = active_s
        self.idle_s = idle_s
        self.most = most
        self.pins: dict[str, Pin] = {}
        self.live: dict[str, Pin] = {}
        self.active: Counter[str] = Counter()

    async def open(self) -> None:
        """Connect; raises ConfigError if the store cannot be reached."""

    async def close(self) -> None:
        pass

    async def find(self, key: str) -> Pin | None:
        return self.pins.get(key)

    async def claim(self, key: str, candidates: Iterable[tuple[Engine, int]], now: float) -> Pin | None:
        """Pin `key` to the first candidate with a free slot, atomically; None if there is none.

        A key that is pinned already keeps its pin. Candidates are engines with the sessions they may hold.
        """
        known = self.pins.get(key)
        if known is not None:
            return known
        if len(self.pins) >= self.most:
            return None
        for engine, limit in candidates:
            if self.active[engine.name] < limit:
                pin = self.pins[key] = Pin(key, engine.pool.name, engine.pool.view, engine.name, now)
                self._wake(pin)
                return pin
        return None

    async def move(self, pin: Pin, engine: Engine) -> None:
        """Re-pin within the pool."""
        assert engine.pool.name == pin.pool
        if pin.live:
            self.active[pin.engine] -= 1
            self.active[engine.name] += 1
        pin.engine = engine.name

    async def release(self, key: str) -> Pin | None:
        """Forget a session; its slot is free. None if it was not known."""
        pin = self.pins.pop(key, None)
        if pin is not None:
            self._sleep(pin)
        return pin

    async def tick(self, now: float) -> None:
        """Turn live sessions without turns dormant and forget those dormant for too long."""
        for pin in [p for p in self.live.values() if not p.in_flight and now - p.last > self.active_s]:
            self._sleep(pin)
        if len(self.pins) > len(self.live):
            for pin in [p for p in self.pins.values() if not p.live and now - p.last > self.idle_s]:
                del self.pins[pin.key]

    def enter(self, pin: Pin, now: float) -> None:
        """A turn starts."""
        pin.last = now
        pin.in_flight += 1
        if not pin.live:
            self._wake(pin)

    def leave(self, pin: Pin, now: float) -> None:
        """A turn ends, however."""
        pin.last = now
        pin.in_flight -= 1

    def record(self, pin: Pin, engine: str, version: int) -> None:
        """A turn was answered by `engine` at `version`."""
        turns = pin.turns
        served = turns[-1] if turns and turns[-1] == (engine, version) else (engine, version)
        if len(turns) >= MAX_TURNS:
            del turns[: MAX_TURNS // 2]
        turns.append(served)

    async def turns(self, pin: Pin) -> list[Served]:
        return pin.turns

    def give_up(self, pin: Pin) -> None:
        """Its pool is lost: free the slot, keep the pin, so that a retry can never end up in another pool."""
        self._sleep(pin)

    def _wake(self, pin: Pin) -> None:
        pin.live = True
        self.live[pin.key] = pin
        self.active[pin.engine] += 1

    def _sleep(self, pin: Pin) -> None:
        if pin.live:
            pin.live = False
            del self.live[pin.key]
            self.active[pin.engine] -= 1
