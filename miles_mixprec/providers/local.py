"""Engines as processes of this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_mixprec.config import Fleet
from miles_mixprec.errors import EngineError
from miles_mixprec.providers.base import Engine, Health
from miles_mixprec.providers.engine import SGLANG, process_health, start_engine
from miles_mixprec.providers.process import EngineProcess


class LocalProvider:
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
        host: str = "127.0.0.1",
        grace_s: float = 10.0,
    ) -> None:
        self.fleet = fleet
        self.logs = Path(run_dir) / "logs"
        self.python = python
        self.server = server
        self.env = dict(extra_env or {})
        self.models = dict(models or {})
        self.host = host
        self.grace_s = grace_s
        self._running: dict[str, tuple[Engine, EngineProcess]] = {}
        self._devices: dict[str, tuple[int, ...]] = {}

    def launch(self, pool: str) -> Sequence[Engine]:
        return self.resize(pool, self.fleet.pools[pool].engines)

    def list(self) -> Sequence[Engine]:
        order = list(self.fleet.pools)
        return sorted((e for e, _ in self._running.values()), key=lambda e: (order.index(e.pool), e.index))

    def resize(self, pool: str, engines: int) -> Sequence[Engine]:
        current = [engine for engine in self.list() if engine.pool == pool]
        _stop_all([self._running.pop(engine.name)[1] for engine in current[engines:]])
        for index in sorted(set(range(engines)) - {engine.index for engine in current}):
            self._start(pool, index)
        return [engine for engine in self.list() if engine.pool == pool]

    def restart(self, name: str) -> Engine:
        """Replace an engine that died or hangs; it comes back under its name, at a new address."""
        engine, process = self._known(name)
        process.stop()
        return self._start(engine.pool, engine.index)

    def stop(self) -> None:
        processes = [process for _, process in self._running.values()]
        self._running.clear()
        _stop_all(processes)

    def address(self, name: str) -> str:
        url = self._known(name)[0].url
        assert url is not None
        return url

    def health(self, name: str) -> Health:
        return process_health(*self._known(name))

    def _start(self, pool_name: str, index: int) -> Engine:
        pool = self.fleet.pools[pool_name]
        name = f"{pool_name}/{index}"
        env = dict(self.env)
        if pool.accelerator != "cpu":
            devices = self._assign_devices(name, pool.accelerators_per_engine)
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        self._running[name] = start_engine(
            self.fleet,
            pool_name,
            index,
            logs=self.logs,
            host=self.host,
            model_path=self.models.get(pool.view),
            python=self.python,
            server=self.server,
            extra_env=env,
            grace_s=self.grace_s,
        )
        return self._running[name][0]

    def _assign_devices(self, name: str, count: int) -> tuple[int, ...]:
        """The lowest devices that no running engine holds."""
        held = {device for engine in self._running if engine != name for device in self._devices.get(engine, ())}
        free = (device for device in range(len(held) + count) if device not in held)
        self._devices[name] = tuple(next(free) for _ in range(count))
        return self._devices[name]

    def _known(self, name: str) -> tuple[Engine, EngineProcess]:
        if name not in self._running:
            known = ", ".join(self._running) or "none"
            raise EngineError(f"engine {name}: not started by this provider, which has {known}")
        return self._running[name]


def _stop_all(processes: Sequence[EngineProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.stop()
