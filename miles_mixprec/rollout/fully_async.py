"""Groups of samples generated without pause, for Miles versions whose rollouts stop between updates."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from miles_mixprec.config import Config, from_args
from miles_mixprec.errors import EngineError

log = logging.getLogger(__name__)

Group = list[Any]  # of Miles samples that share a prompt
_streams: dict[int, GroupStream] = {}


class GroupStream:
    """Keeps the fleet's slots filled with groups and hands out finished ones in the order in which they finish.

    A group with an aborted sample is dropped whole and replaced. About one batch waits finished, so a slow trainer
    stops the samplers in the end, not the other way round. A fleet that yields nothing but lost groups is an error.
    """

    def __init__(
        self, config: Config, fetch: Callable[[], Group], generate: Callable[[Group], Awaitable[Group]]
    ) -> None:
        self.fetch, self.generate = fetch, generate
        self.concurrency = max(1, config.fleet.slots // config.samples_per_prompt)
        self.capacity = config.prompts_per_update
        self.finished: asyncio.Queue[Group] = asyncio.Queue()
        self.running: set[asyncio.Task[Group]] = set()
        self.dropped: Counter[str] = Counter()
        self.lost_in_a_row = 0
        self.feeder: asyncio.Task[None] | None = None

    @classmethod
    def of(
        cls, args: Namespace, fetch: Callable[[], Group], generate: Callable[[Group], Awaitable[Group]]
    ) -> GroupStream:
        """The one stream of this process."""
        if id(args) not in _streams:
            _streams[id(args)] = cls(from_args(args), fetch, generate)
        return _streams[id(args)]

    async def take(self, count: int) -> list[Group]:
        """The next `count` finished groups. Any error of a group, or of the feeder, is raised here."""
        if self.feeder is None:
            self.feeder = asyncio.create_task(self._feed())
        groups: list[Group] = []
        while len(groups) < count:
            getter = asyncio.create_task(self.finished.get())
            await asyncio.wait({getter, self.feeder}, return_when=asyncio.FIRST_COMPLETED)
            if not getter.done():
                getter.cancel()
                self.feeder.result()
            groups.append(getter.result())
        return sorted(groups, key=lambda group: group[0].index)

    def metrics(self) -> dict[str, float]:
        """Groups dropped since the last call, by the pool that lost them."""
        metrics = {f"rollout/mixprec/dropped_groups/{pool}": float(count) for pool, count in self.dropped.items()}
        self.dropped.clear()
        return metrics

    async def _feed(self) -> None:
        while True:
            while len(self.running) < self.concurrency and self.finished.qsize() < self.capacity:
                self.running.add(asyncio.ensure_future(self.generate(self.fetch())))
            if not self.running:
                await asyncio.sleep(0.05)
                continue
            done, self.running = await asyncio.wait(self.running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._keep(task.result())

    def _keep(self, group: Group) -> None:
        aborted = [sample for sample in group if sample.status == type(sample).Status.ABORTED]
        if not aborted:
            self.finished.put_nowait(group)
            self.lost_in_a_row = 0
            return
        self.lost_in_a_row += 1
        reason = aborted[0].metadata.get("mixprec", {})
        self.dropped[str(reason.get("pool"))] += 1
        log.warning("group %s dropped: %s", group[0].group_index, reason.get("lost", "aborted"))
        if self.lost_in_a_row > 3 * self.concurrency:
            raise EngineError(
                f"{self.lost_in_a_row} groups in a row were lost, last from pool {reason.get('pool')}: "
                f"{reason.get('lost', 'aborted')}; see the router's GET /fleet"
            )
