"""Groups keep running between calls, dropped ones are replaced, and no error is swallowed."""

import asyncio
import itertools
from enum import Enum
from types import SimpleNamespace

import pytest

from miles_mixprec import config as configuration
from miles_mixprec.errors import EngineError
from miles_mixprec.rollout.fully_async import GroupStream


class Sample(SimpleNamespace):
    class Status(Enum):
        COMPLETED = 1
        ABORTED = 2


def make_config(**overrides):
    values = {
        "run_dir": "x", "run_id": "x", "updates": 1, "prompts_per_update": 2, "samples_per_prompt": 2,
        "fleet.model": "m", "weights.store": "s", "fleet.pools.bf16.slots_per_engine": 2,
        "fleet.pools.fp8.slots_per_engine": 2, "fleet.pools.nvfp4.slots_per_engine": 2, **overrides,
    }  # fmt: skip
    return configuration.load("config", [f"{key}={value}" for key, value in values.items()])


def make_stream(generate, **overrides):
    indices = itertools.count()

    def fetch():
        index = next(indices)
        return [Sample(index=index, group_index=index, status=None, metadata={}) for _ in range(2)]

    return GroupStream(make_config(**overrides), fetch, generate)


def test_aborted_groups_are_dropped_whole_and_counted_by_pool():
    async def generate(group):
        await asyncio.sleep(0)
        for sample in group:
            sample.status = Sample.Status.COMPLETED
        if group[0].index % 3 == 1:
            group[1].status = Sample.Status.ABORTED
            group[1].metadata["mixprec"] = {"pool": "fp8", "lost": "gone"}
        return group

    async def scenario():
        stream = make_stream(generate)
        groups = [group for _ in range(6) for group in await stream.take(2)]
        stream.feeder.cancel()
        return groups, stream.metrics(), stream.metrics()

    groups, metrics, again = asyncio.run(scenario())
    assert [group[0].index for group in groups if group[0].index % 3 == 1] == []
    assert len({group[0].index for group in groups}) == 12
    assert metrics["rollout/mixprec/dropped_groups/fp8"] >= 4
    assert again == {}


def test_generation_goes_on_while_nobody_takes_and_stops_at_the_buffer():
    started = []

    async def generate(group):
        started.append(group[0].index)
        await asyncio.sleep(0)
        for sample in group:
            sample.status = Sample.Status.COMPLETED
        return group

    async def scenario():
        stream = make_stream(generate)
        await stream.take(2)
        await asyncio.sleep(0.2)
        count = len(started)
        await asyncio.sleep(0.2)
        stream.feeder.cancel()
        return stream, count

    stream, count = asyncio.run(scenario())
    assert count == len(started)  # full: no further group is begun
    assert stream.capacity <= stream.finished.qsize() <= stream.capacity + stream.concurrency


def test_an_episode_s_error_reaches_the_caller():
    async def generate(group):
        raise ZeroDivisionError("environment")

    async def scenario():
        await make_stream(generate).take(1)

    with pytest.raises(ZeroDivisionError, match="environment"):
        asyncio.run(scenario())


def test_a_fleet_that_loses_everything_is_an_error_not_a_loop():
    async def generate(group):
        await asyncio.sleep(0)
        group[0].status, group[1].status = Sample.Status.ABORTED, Sample.Status.COMPLETED
        group[0].metadata["mixprec"] = {"pool": "nvfp4", "lost": "gone"}
        return group

    async def scenario():
        await make_stream(generate).take(1)

    with pytest.raises(EngineError, match=r"\d+ groups in a row were lost, last from pool nvfp4: gone"):
        asyncio.run(scenario())


def test_slots_bound_the_sessions_in_flight():
    running, peak = 0, 0

    async def generate(group):
        nonlocal running, peak
        running += len(group)
        peak = max(peak, running)
        await asyncio.sleep(0.001)
        running -= len(group)
        for sample in group:
            sample.status = Sample.Status.COMPLETED
        return group

    async def scenario():
        stream = make_stream(generate)
        for _ in range(10):
            await stream.take(2)
        stream.feeder.cancel()

    asyncio.run(scenario())
    assert peak == 6  # three pools of two slots
