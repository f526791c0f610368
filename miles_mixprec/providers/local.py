"""Engines as processes of this machine."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from miles_mixprec.config import Fleet
from miles_mixprec.providers.base import Engine, Health, Provider
from miles_mixprec.providers.engine import SGLANG, process_health, start_engine
from miles_mixprec.providers.process import EngineProcess


class LocalProvider(Provider):
    """SGLang servers started by `python`, each with a process group and a log of its own.

    `models` maps views to the Hugging Face directories that their engines start from; a view left out starts from
    `fleet.model`. Accelerators are handed out in the order of the pools through CUDA_VISIBLE_DEVICES.
    """

    def __init__(
        self,
        fleet: Fleet,
        run_dir: str | Path,
        *,
        python: str = sys.executable,
        server: Sequence[str] = SGLANG,
        extra_env: Mapping[str, str] | None = None,
        models: Mapping[str, str] | None = None,
        grace_s: float = 10.0,
    ) -> None:
        self.fleet = fleet
        self._env = dict(extra_env or {})
        self._models = dict(models or {})
        self._start_engine = partial(
            start_engine, fleet, logs=Path(run_dir) / "logs", python=python, server=server, grace_s=grace_s
        )
        self._running: dict[str, tuple[Engine, EngineProcess]] = {}
        self._devices: dict[str, Sequence[int]] = {}

    def list(self) -> Sequence[Engine]:
        return [engine for pool in self.fleet.pools for engine, _ in self._running.values() if engine.pool == pool]

    def _resize(self, pool: str, engines: int) -> None:
        current = self._engines_of(pool)
        _stop_all([self._running.pop(engine.name)[1] for engine in current[engines:]])
        for index in range(len(current), engines):
            self._start(pool, index)

    def stop(self) -> None:
        processes = [process for _, process in self._running.values()]
        self._running.clear()
        _stop_all(processes)

    def health(self, name: str) -> Health:
        engine = self._engine(name)
        return process_health(engine, self._running[name][1])

    def _start(self, pool_name: str, index: int) -> None:
        pool = self.fleet.pools[pool_name]
        name = f"{pool_name}/{index}"
        env = dict(self._env)
        if pool.accelerator != "cpu":
            devices = self._assign_devices(name, pool.accelerators_per_engine)
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        model = self._models.get(pool.view)
        self._running[name] = self._start_engine(pool_name, index, model_path=model, extra_env=env)

    def _assign_devices(self, name: str, count: int) -> Sequence[int]:
        """The lowest devices that no running engine holds."""
        held = {device for engine in self._running for device in self._devices.get(engine, ())}
        free = (device for device in itertools.count() if device not in held)
        self._devices[name] = list(itertools.islice(free, count))
        return self._devices[name]


def _stop_all(processes: Sequence[EngineProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.stop()
