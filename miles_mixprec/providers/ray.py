"""Engines as Ray actors: placed by accelerator type, one actor per engine, restarted by Ray when they die."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from miles_mixprec.config import Config, Fleet
from miles_mixprec.errors import EngineError
from miles_mixprec.fleet.accelerators import ACCELERATORS
from miles_mixprec.providers.base import Engine, Health, Provider, responds
from miles_mixprec.providers.engine import SGLANG, process_health, start_engine, start_sidecar
from miles_mixprec.providers.process import EngineProcess

STATUS_TIMEOUT_S = 0.2
_PLACED = 0.001  # share of an accelerator-type resource that pins an actor to such nodes without using it up


@dataclass(frozen=True)
class Launch:
    """How every actor starts its engine. `sidecar` and `router_url` together start a sidecar beside it."""

    run_dir: str
    python: str = sys.executable
    server: tuple[str, ...] = SGLANG
    extra_env: Mapping[str, str] | None = None
    models: Mapping[str, str] | None = None
    sidecar: Config | None = None
    router_url: str = ""
    host: str | None = None  # address that engines bind to; None: the node's own


class EngineActor:
    """One engine. Dies when an engine that has served ends, so that Ray starts both again, maybe elsewhere."""

    def __init__(self, fleet: Fleet, pool: str, index: int, launch: Launch) -> None:
        self.launch = launch
        self.engine, self.process = start_engine(
            fleet,
            pool,
            index,
            logs=Path(launch.run_dir) / "logs",
            host=launch.host or ray.util.get_node_ip_address(),
            model_path=(launch.models or {}).get(fleet.pools[pool].view),
            python=launch.python,
            server=launch.server,
            extra_env=launch.extra_env,
        )
        self.sidecar: EngineProcess | None = None
        self.served = False
        threading.Thread(target=self._watch, daemon=True).start()

    def status(self) -> tuple[str, Health]:
        """(URL, health) of the engine."""
        assert self.engine.url is not None
        return self.engine.url, process_health(self.engine, self.process)

    def stop(self) -> None:
        self.served = False
        for process in (self.sidecar, self.process):
            if process is not None:
                process.stop()

    def _watch(self) -> None:
        assert self.engine.url is not None
        while True:
            ended = self.process.returncode is not None
            if ended and self.served:
                os._exit(1)
            if not ended and not self.served and responds(self.engine.url):
                self.served = True
                if self.launch.sidecar is not None:
                    self.sidecar = self._start_sidecar(self.launch.sidecar)
            time.sleep(0.5)

    def _start_sidecar(self, config: Config) -> EngineProcess:
        run_dir, engine = Path(self.launch.run_dir), self.engine
        staging = run_dir / "staging" / f"{engine.pool}-{engine.index}"
        router = self.launch.router_url
        return start_sidecar(config, engine, router_url=router, logs=run_dir / "logs", staging=staging)


@dataclass
class _Handle:
    actor: Any
    status: Any  # the outstanding call
    health: Health
    url: str | None = None


class RayProvider(Provider):
    """Actors on the Ray cluster that this process is connected to.

    A pool's actors ask for `accelerators_per_engine` GPUs (none for CPU pools), its `cpus` and `memory_gib`, and a
    trace of its accelerator's `ray_resource`, which nodes offer by themselves or through `ray start --resources`.
    """

    def __init__(self, fleet: Fleet, launch: Launch) -> None:
        if not ray.is_initialized():
            raise EngineError("provider ray: not connected to a Ray cluster; call ray.init(address=...) first")
        self.fleet = fleet
        self._launch = launch
        self._handles: dict[str, list[_Handle]] = {pool: [] for pool in fleet.pools}

    def list(self) -> Sequence[Engine]:
        self._refresh()
        return [
            Engine(pool, index, handle.url)
            for pool, handles in self._handles.items()
            for index, handle in enumerate(handles)
        ]

    def _resize(self, pool: str, engines: int) -> None:
        handles = self._handles[pool]
        surplus = handles[engines:]
        del handles[engines:]
        _stop_all(surplus)
        actor_class = ray.remote(**actor_options(self.fleet, pool))(EngineActor)
        for index in range(len(handles), engines):
            actor = actor_class.remote(self.fleet, pool, index, self._launch)
            handles.append(_Handle(actor, actor.status.remote(), Health("starting", "asked for")))

    def stop(self) -> None:
        _stop_all([handle for handles in self._handles.values() for handle in handles])
        self._handles = {pool: [] for pool in self.fleet.pools}

    def health(self, name: str) -> Health:
        engine = self._engine(name)
        return self._handles[engine.pool][engine.index].health

    def _refresh(self) -> None:
        """Take the answers that are there and ask again; an actor that cannot answer yet keeps its last state."""
        outstanding = {handle.status: (pool, handle) for pool, handles in self._handles.items() for handle in handles}
        if not outstanding:
            return
        answered, waiting = ray.wait(list(outstanding), num_returns=len(outstanding), timeout=STATUS_TIMEOUT_S)
        for reference in answered:
            _, handle = outstanding[reference]
            try:
                handle.url, handle.health = ray.get(reference)
            except RayActorError as error:
                handle.url, handle.health = None, Health("starting", f"restarting after {type(error).__name__}")
            handle.status = handle.actor.status.remote()
        for reference in waiting:
            pool, handle = outstanding[reference]
            if handle.url is None:
                resource = ACCELERATORS[self.fleet.pools[pool].accelerator].ray_resource
                handle.health = Health("starting", f"waits for a node with {resource}")


def actor_options(fleet: Fleet, pool_name: str) -> dict[str, Any]:
    """Ray options of a pool's actors: resources, placement, unlimited restarts."""
    pool = fleet.pools[pool_name]
    options: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": 4}
    options["num_cpus"] = pool.cpus if pool.cpus is not None else (1 if pool.accelerator == "cpu" else 0)
    if pool.memory_gib is not None:
        options["memory"] = pool.memory_gib << 30
    if pool.accelerator != "cpu":
        options["num_gpus"] = pool.accelerators_per_engine
        options["resources"] = {ACCELERATORS[pool.accelerator].ray_resource: _PLACED}
    return options


def _stop_all(handles: Sequence[_Handle]) -> None:
    stopping = [handle.actor.stop.remote() for handle in handles if handle.url is not None]
    if stopping:
        ray.wait(stopping, num_returns=len(stopping), timeout=30)
    for handle in handles:
        ray.kill(handle.actor)
