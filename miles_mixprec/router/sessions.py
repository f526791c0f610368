"""Pins: which pool and engine a session lives on.

A pin's pool never changes. It outlives changes of weights, engines that come and go, and the router itself: with a
journal (one router) or Redis (several). A session is *live*, and takes one of its engine's slots, while a turn is in
flight and for `active_s` after its last one (its agent is running a tool); then it is *dormant*: it keeps its pin
until `idle_s`, but not its slot. A client that knows its session is over says so (`DELETE /sessions/{key}`), which
frees the slot at once. Keys name one session for ever; an ended one's key is not to be used again.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_mixprec.errors import ConfigError

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
    last: float = 0.0  # clock of its last turn's start or end
    in_flight: int = 0
    lasting: bool = True  # False: a single turn without a session key
    turns: list[Served] = field(default_factory=list)  # equal neighbours share one tuple

    @property
    def home(self) -> list[str]:
        return [self.pool, self.view, self.engine]


class MemoryPins:
    """Pins of one router, in memory, optionally with a journal; also the local side of `RedisPins`.

    `active` counts live sessions by engine name. `facts` are other things that a restarted router must know, such as
    the newest versions of views, by kind and name.
    """

    def __init__(self, active_s: float, idle_s: float, most: int, journal: Journal | None = None) -> None:
        self.active_s = active_s
        self.idle_s = idle_s
        self.most = most
        self.journal = journal
        self.pins: dict[str, Pin] = {}
        self.live: set[Pin] = set()
        self.active: Counter[str] = Counter()
        self.facts: dict[str, dict[str, Any]] = {}

    async def open(self, now: float) -> None:
        """Recover what a former router left. Raises ConfigError if the store cannot be reached."""
        if self.journal is None:
            return
        for kind, name, value in self.journal.read():
            if kind != "pin":
                _put(self.facts.setdefault(kind, {}), name, value)
            elif value is None:
                self.pins.pop(name, None)
            else:
                pool, view, engine = value
                self.pins[name] = Pin(name, pool, view, engine, now)
        self.journal.rewrite(self._lines())

    async def close(self) -> None:
        if self.journal is not None:
            self.journal.close()

    async def find(self, key: str) -> Pin | None:
        return self.pins.get(key)

    async def claim(
        self, key: str, candidates: Iterable[tuple[Engine, int]], now: float, *, lasting: bool = True
    ) -> Pin | None:
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
                return self._add(Pin(key, engine.pool.name, engine.pool.view, engine.name, now, lasting=lasting))
        return None

    async def move(self, pin: Pin, engine: Engine) -> None:
        """Re-pin within the pool."""
        assert engine.pool.name == pin.pool
        if pin in self.live:
            self.active[pin.engine] -= 1
            self.active[engine.name] += 1
        pin.engine = engine.name
        self._note(pin)

    async def release(self, key: str) -> bool:
        """Forget a session; its slot is free. False if it was not known."""
        pin = self.pins.pop(key, None)
        if pin is not None:
            self._sleep(pin)
            if self.journal is not None and pin.lasting:
                self.journal.write("pin", key, None)
        return pin is not None

    async def give_up(self, pin: Pin) -> None:
        """Its pool is lost: free the slot, keep the pin, so that a retry can never end up in another pool."""
        self._sleep(pin)

    async def record(self, pin: Pin, engine: str, version: int) -> None:
        """A turn was answered by `engine` at `version`."""
        turns = pin.turns
        served = turns[-1] if turns and turns[-1] == (engine, version) else (engine, version)
        if len(turns) >= MAX_TURNS:
            del turns[: MAX_TURNS // 2]
        turns.append(served)

    async def turns(self, pin: Pin) -> list[Served]:
        return pin.turns

    async def remember(self, kind: str, name: str, value: Any) -> None:
        """Keep a fact beyond the life of this router; None forgets it."""
        _put(self.facts.setdefault(kind, {}), name, value)
        if self.journal is not None:
            self.journal.write(kind, name, value)

    async def tick(self, now: float) -> None:
        """Turn live sessions without turns dormant and forget those dormant for too long."""
        for pin in [p for p in self.live if not p.in_flight and now - p.last > self.active_s]:
            self._sleep(pin)
        if len(self.pins) > len(self.live):
            for pin in [p for p in self.pins.values() if p not in self.live and now - p.last > self.idle_s]:
                del self.pins[pin.key]
        if self.journal is not None and self.journal.lines > 2 * len(self.pins) + 10_000:
            self.journal.rewrite(self._lines())

    def enter(self, pin: Pin, now: float) -> None:
        """A turn starts."""
        pin.last = now
        pin.in_flight += 1
        self._wake(pin)

    def leave(self, pin: Pin, now: float) -> None:
        """A turn ends, however."""
        pin.last = now
        pin.in_flight -= 1

    def _add(self, pin: Pin) -> Pin:
        self.pins[pin.key] = pin
        self._wake(pin)
        self._note(pin)
        return pin

    def _kept(self, pin: Pin) -> bool:
        """Outlives its turn: neither a single turn nor released while that was under way."""
        return pin.lasting and self.pins.get(pin.key) is pin

    def _note(self, pin: Pin) -> None:
        if self.journal is not None and self._kept(pin):
            self.journal.write("pin", pin.key, pin.home)

    def _lines(self) -> Iterator[tuple[str, str, Any]]:
        for kind, facts in self.facts.items():
            yield from ((kind, name, value) for name, value in facts.items())
        yield from (("pin", pin.key, pin.home) for pin in self.pins.values() if pin.lasting)

    def _wake(self, pin: Pin) -> None:
        if pin not in self.live and self.pins.get(pin.key) is pin:
            self.live.add(pin)
            self.active[pin.engine] += 1

    def _sleep(self, pin: Pin) -> None:
        if pin in self.live:
            self.live.remove(pin)
            self.active[pin.engine] -= 1


class Journal:
    """An append-only file of `[kind, name, value]` lines, the last of a name wins; rewritten when it has grown.

    Written when a session starts, moves or ends, never per turn. A torn last line, left by a crash, is ignored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab", buffering=0)

    def read(self) -> Iterator[tuple[str, str, Any]]:
        """Raises ConfigError for a file that is no journal."""
        whole = self.path.read_bytes().rpartition(b"\n")[0]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                kind, name, value = json.loads(line)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"router.journal={self.path}: line {number}: {error}; remove the file") from None
            yield kind, name, value

    def write(self, kind: str, name: str, value: Any) -> None:
        self.file.write(json.dumps((kind, name, value)).encode() + b"\n")
        self.lines += 1

    def rewrite(self, lines: Iterable[tuple[str, str, Any]]) -> None:
        """Replace the file by `lines`, atomically."""
        fresh = self.path.with_name(self.path.name + ".new")
        entries = [json.dumps(line).encode() + b"\n" for line in lines]
        fresh.write_bytes(b"".join(entries))
        os.replace(fresh, self.path)
        self.file.close()
        self.file = self.path.open("ab", buffering=0)
        self.lines = len(entries)

    def close(self) -> None:
        self.file.close()


def _put(facts: dict[str, Any], name: str, value: Any) -> None:
    if value is None:
        facts.pop(name, None)
    else:
        facts[name] = value
