"""Multi-turn sessions against a router, held to what the router promises whatever the engines do.

no session changes pool · no reply is lost, doubled or given to somebody else · headers name the engine and version
that really answered · attempts and requests balance when all is over
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field

import aiohttp
from fake_engine import FakeEngine
from running import KEY, Running

RETRIED = (409, 429, 502, 503, 504)


@dataclass
class Session:
    key: str
    sources: list[tuple[str, str, int]] = field(default_factory=list)
    lost: bool = False  # its pool was, and it was told so


@dataclass
class Traffic:
    """`concurrent` clients, each playing one session after the other until `stop` is set."""

    router: Running
    fakes: list[FakeEngine]
    turns: int = 4
    think_s: float = 0.01
    turn_s: float = 0.02
    size: int = 100
    versions_change_in_mid_turn: bool = False  # then the header names the version at the start, rightly
    sessions: list[Session] = field(default_factory=list)
    stop: bool = False
    slowest_s: float = 0.0
    retries: dict[str, int] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def start(self, concurrent: int) -> Traffic:
        self.tasks = [asyncio.ensure_future(self._client()) for _ in range(concurrent)]
        return self

    async def finish(self, limit_s: float = 30.0) -> None:
        """Let every session end, then check the books."""
        self.stop = True
        await asyncio.wait_for(asyncio.gather(*self.tasks), limit_s)
        self.check()

    async def _client(self) -> None:
        while not self.stop:
            session = Session(f"s{next(self.numbers)}")
            self.sessions.append(session)
            for turn in range(self.turns):
                await self._turn(session, f"{session.key}.{turn}")
                if session.lost:
                    break
                await asyncio.sleep(self.think_s * self.rng.random())
            async with self.router.http.delete(f"{self.router.url}/sessions/{session.key}"):
                pass

    async def _turn(self, session: Session, turn: str) -> None:
        began = time.monotonic()
        body = {"turn": turn, "sleep": self.turn_s * self.rng.random(), "size": self.size}
        while True:
            try:
                async with self.router.http.post(
                    self.router.url + "/generate", json=body, headers={KEY: session.key}
                ) as reply:
                    text = await reply.read()
                    status, head = reply.status, reply.headers
            except aiohttp.ClientError:
                status, text, head = 0, b"", {}
            if status == 200:
                break
            kind = json.loads(text)["error"]["type"] if text else "connection"
            self.retries[kind] = self.retries.get(kind, 0) + 1
            if kind == "pool_unavailable":
                session.lost = True
                return
            assert status in (0, *RETRIED), (status, text)
            await asyncio.sleep(0.05)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        answer = json.loads(text)
        assert answer["meta_info"]["turn"] == turn, "a reply went to the wrong turn"
        assert len(answer["text"]) == self.size
        source = head["X-Mixprec-Pool"], head["X-Mixprec-Engine"], int(head["X-Mixprec-Weight-Version"])
        if not self.versions_change_in_mid_turn:
            assert answer["meta_info"]["weight_version"] == str(source[2]), "the header names another version"
        assert turn in self._engine(source[1]).answered, "the header names an engine that did not answer"
        session.sources.append(source)

    def _engine(self, name: str) -> FakeEngine:
        return next(fake for fake in self.fakes if fake.name == name)

    def check(self) -> None:
        for session in self.sessions:
            pools = {pool for pool, _, _ in session.sources}
            assert len(pools) <= 1, f"{session.key} was served by {pools}"
            assert session.lost or len(session.sources) == self.turns
        hops = self.router.proxy.hops
        assert hops.received == hops.answered + sum(hops.refused.values()) + hops.broken + hops.disconnected
        assert not self.router.proxy.turns and not self.router.pins.pins
        assert sum(self.router.pins.active.values()) == 0
        for engine in self.router.fleet.engines():
            assert engine.sent == engine.returned + engine.failed and not engine.in_flight

    @property
    def done(self) -> int:
        return sum(len(session.sources) for session in self.sessions)

    def served(self, since: int = 0) -> set[str]:
        """Pools that answered sessions number `since` and later."""
        return {pool for session in self.sessions[since:] for pool, _, _ in session.sources}
