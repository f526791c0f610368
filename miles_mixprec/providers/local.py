"""Engines as processes of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_mixprec.config import Fleet
from miles_mixprec.errors import EngineError
from miles_mixprec.fleet.arguments import engine_environment, known_arguments, sglang_arguments
from miles_mixprec.providers.base import Engine, Health, responds
from miles_mixprec.providers.process import EngineProcess, free_port


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
        extra_env: Mapping[str, str] | None = None,
        models: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        grace_s: float = 10.0,
    ) -> None:
        self.fleet = fleet
        self.logs = Path(run_dir) / "logs"
        self.python = python
        self.env = {**os.environ, **(extra_env or {})}
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
        surplus = [self._running.pop(engine.name)[1] for engine in current[engines:]]
        for process in surplus:
            process.terminate()
        for process in surplus:
            process.stop()
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
        for process in processes:
            process.terminate()
        for process in processes:
            process.stop()

    def address(self, name: str) -> str:
        url = self._known(name)[0].url
        assert url is not None
        return url

    def health(self, name: str) -> Health:
        engine, process = self._known(name)
        if process.returncode is not None:
            return Health(
                "failed",
                f"pool {engine.pool}: engine {name} exited with status {process.returncode}: {process.cause()}; "
                f"see {process.log}, then correct fleet.pools.{engine.pool} (sglang, env) or the engines' Python",
            )
        return Health("ready") if responds(self.address(name)) else Health("starting", process.cause())

    def log(self, name: str) -> Path:
        return self._known(name)[1].log

    def _start(self, pool_name: str, index: int) -> Engine:
        pool = self.fleet.pools[pool_name]
        env = self.env | engine_environment(pool)
        port = free_port(self.host)
        engine = Engine(pool_name, index, f"http://{self.host}:{port}")
        if pool.accelerator != "cpu":
            devices = self._assign_devices(engine.name, pool.accelerators_per_engine)
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        arguments = sglang_arguments(
            self.fleet,
            pool,
            model_path=self.models.get(pool.view, self.fleet.model),
            port=port,
            host=self.host,
            known=known_arguments(self.python, env) if pool.sglang else None,
        )
        command = [self.python, "-m", "sglang.launch_server", *arguments]
        log = self.logs / f"engine-{pool_name}-{index}.log"
        self._running[engine.name] = (engine, EngineProcess(command, env=env, log=log, grace_s=self.grace_s))
        return engine

    def _assign_devices(self, name: str, count: int) -> tuple[int, ...]:
        """The lowest devices that no running engine holds."""
        held = {device for engine in self._running if engine != name for device in self._devices.get(engine, ())}
        free = (device for device in range(len(held) + count) if device not in held)
        self._devices[name] = tuple(next(free) for _ in range(count))
        return self._devices[name]

    def _known(self, name: str) -> tuple[Engine, EngineProcess]:
        if name not in self._running:
            raise EngineError(
                f"engine {name}: not started by this provider; it has {', '.join(self._running) or 'none'}"
            )
        return self._running[name]
