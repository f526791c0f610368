"""Engines on Modal: one class per pool, one container per engine, all of a run in one app.

The app is `miles_mixprec.providers.modal_app`, built from the run's configuration. Containers write where they are and
how they are into a `modal.Dict` named after the app; that is how this provider, and the engines' sidecars, find
engines and router. Containers that were preempted come back under the name that became free.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import modal

from miles_mixprec.config import Config, from_file, from_mapping, to_file, to_mapping
from miles_mixprec.errors import ConfigError, EngineError
from miles_mixprec.fleet.accelerators import accelerator
from miles_mixprec.providers.base import Engine, Health, Provider
from miles_mixprec.providers.engine import process_health, start_engine, start_sidecar
from miles_mixprec.providers.process import EngineProcess

APP_MODULE = "miles_mixprec.providers.modal_app"
CONFIG_VARIABLE = "MIXPREC_CONFIG"  # the run's configuration as JSON, in every container
ENGINE_PORT, ROUTER_PORT = 30000, 8000
BEAT_S, LOST_S = 10.0, 60.0  # how often a container reports, and after how long without it is gone
SCRATCH = Path("/tmp/mixprec")
_PRIVATE_NETWORK, _TUNNELS = "fdaa:*", "*.modal.host"  # hosts of engines, as the router sees them


@dataclass(frozen=True)
class ModalApp:
    app: modal.App
    engines: dict[str, Any]  # pool -> modal.Cls
    classes: dict[str, Any]  # by class name: the pools' and, if hosted here, `Router`


def app_name(config: Config) -> str:
    return f"mixprec-{config.run_id}"


def engine_options(config: Config, pool_name: str) -> dict[str, Any]:
    """Arguments of `app.cls` for one pool: accelerators, cores, memory (request and limit in MiB), scale, mounts."""
    pool, settings = config.fleet.pools[pool_name], config.fleet.modal
    gpu = accelerator(pool.accelerator).modal_gpu
    memory = (pool.memory_gib or 8) << 10
    return _shared_options(config) | {
        "gpu": f"{gpu}:{pool.accelerators_per_engine}" if gpu else None,
        "cpu": pool.cpus,
        "memory": (memory, max(memory, settings.memory_limit_gib << 10)),
        "ephemeral_disk": settings.ephemeral_disk_gib << 10,
        "min_containers": pool.engines,
        "max_containers": pool.max_engines or pool.engines,
        "startup_timeout": settings.startup_timeout_s,
    }


def build_app(config: Config, module: str = APP_MODULE) -> ModalApp:
    """The app of a run, not yet deployed; needs no credentials. Raises ConfigError for settings that cannot work.

    A router with both tokens also gets a public address; without them it stays on the private network.
    """
    settings = config.fleet.modal
    if not settings.router_url and not settings.private and not _has_tokens(config):
        raise ConfigError(
            "fleet.modal.private=false puts the router at a public address: set router.client_token_env and "
            "router.admin_token_env, and name a Modal secret with both variables in fleet.modal.secrets"
        )
    if settings.private and settings.region is None:
        raise ConfigError("fleet.modal.private: private addresses exist within one region; set fleet.modal.region")
    app = modal.App(app_name(config))
    engines, classes = {}, {}
    for name in config.fleet.pools:
        class_name = f"Engine_{name.replace('-', '_')}"
        body = {"pool": name, "config": config, "__module__": module}
        engine_class = type(class_name, (_EngineContainer,), body)
        engines[name] = classes[class_name] = app.cls(**engine_options(config, name))(engine_class)
    if not settings.router_url:
        options = _shared_options(config) | {"cpu": 4, "min_containers": 1, "max_containers": 1}
        options |= {"nonpreemptible": True, "startup_timeout": 300}
        router_class = type("Router", (_RouterContainer,), {"config": config, "__module__": module})
        classes["Router"] = app.cls(**options)(router_class)
    return ModalApp(app, engines, classes)


def _shared_options(config: Config) -> dict[str, Any]:
    settings = config.fleet.modal
    image = modal.Image.from_registry(settings.image).entrypoint([]).pip_install(*settings.packages.split())
    return {
        "image": image.add_local_python_source("miles_mixprec", ignore=["**/__pycache__"]),
        "env": {CONFIG_VARIABLE: json.dumps(to_mapping(config))},
        "secrets": [modal.Secret.from_name(name) for name in settings.secrets],
        "volumes": {path: modal.Volume.from_name(name) for path, name in settings.volumes.items()},
        "region": settings.region,
        "i6pn": settings.private,
        "scaledown_window": 1200,
        "include_source": False,
    }


class ModalProvider(Provider):
    """Deploys the run's app on the first `launch` and reads the state of its containers.

    A pool is resized through Modal's autoscaler: its floor and ceiling become the number of engines.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.fleet = config.fleet
        self._app: ModalApp | None = None
        self._wanted: dict[str, int] = {}

    def launch(self, pool: str) -> Sequence[Engine]:
        if self._app is None:
            self._app = self._deploy()
        self._wanted[pool] = self.fleet.pools[pool].engines
        return self._engines_of(pool)

    def list(self) -> Sequence[Engine]:
        entries = self._entries()
        return [
            Engine(pool, index, entries.get(f"{pool}/{index}", {}).get("url"))
            for pool, count in self._wanted.items()
            for index in range(count)
        ]

    def _resize(self, pool: str, engines: int) -> None:
        if self._app is None:
            raise EngineError(f"pool {pool}: the app is not deployed; launch before resizing")
        self._app.engines[pool]().update_autoscaler(min_containers=engines, max_containers=engines)
        self._wanted[pool] = engines

    def stop(self) -> None:
        if self._app is not None:
            subprocess.run([sys.executable, "-m", "modal", "app", "stop", "--yes", app_name(self.config)], check=True)
        self._app = None
        self._wanted.clear()

    def health(self, name: str) -> Health:
        entry = self._entries().get(name)
        if entry is None:
            return Health("starting", "Modal has not placed its container yet")
        return Health(entry["state"], entry["detail"])

    def _deploy(self) -> ModalApp:
        os.environ[CONFIG_VARIABLE] = json.dumps(to_mapping(self.config))
        module = importlib.import_module(APP_MODULE)
        built: ModalApp = importlib.reload(module).built
        try:
            built.app.deploy()
        except modal.exception.AuthError as error:
            raise EngineError(
                "provider modal: no valid Modal credentials; run `modal token new`, or set MODAL_TOKEN_ID and "
                "MODAL_TOKEN_SECRET"
            ) from error
        return built

    def _entries(self) -> dict[str, dict[str, Any]]:
        if not self._wanted:
            return {}
        now = time.time()
        return {name: entry for name, entry in _directory(self.config).items() if now - entry["at"] < LOST_S}


def container_config() -> Config:
    """The run's configuration inside a container, or where the app is built."""
    if CONFIG_VARIABLE in os.environ:
        return from_mapping(json.loads(os.environ[CONFIG_VARIABLE]))
    if "MIXPREC_RUN" in os.environ:
        return from_file(os.environ["MIXPREC_RUN"])
    raise ConfigError("MIXPREC_RUN is not set; give it the path of the run's YAML configuration")


def _has_tokens(config: Config) -> bool:
    return config.router.client_token_env is not None and config.router.admin_token_env is not None


def _directory(config: Config) -> Any:
    return modal.Dict.from_name(app_name(config), create_if_missing=True)


def _address(private: bool, port: int, tunnels: ExitStack) -> tuple[str, str]:
    """(host to bind, URL for others) of a port of this container."""
    if private:
        host = socket.getaddrinfo("i6pn.modal.local", None, socket.AF_INET6)[0][4][0]
        return "::", f"http://[{host}]:{port}"
    return "0.0.0.0", tunnels.enter_context(modal.forward(port)).url


class _EngineContainer:
    """One engine with its sidecar. Claims the lowest free name of its pool and reports every BEAT_S."""

    config: ClassVar[Config]
    pool: ClassVar[str]

    @modal.enter()
    def start(self) -> None:
        self.directory = _directory(self.config)
        self.tunnels = ExitStack()
        host, url = _address(self.config.fleet.modal.private, ENGINE_PORT, self.tunnels)
        index = next(index for index in range(10_000) if self._claim(f"{self.pool}/{index}"))
        logs = SCRATCH / "logs"
        _, self.process = start_engine(self.config.fleet, self.pool, index, logs=logs, host=host, port=ENGINE_PORT)
        self.engine = Engine(self.pool, index, url)
        loopback = "[::1]" if host == "::" else "127.0.0.1"  # asyncio servers on :: take no IPv4
        self.local = Engine(self.pool, index, f"http://{loopback}:{ENGINE_PORT}")
        self.sidecar: EngineProcess | None = None
        self.leaving = threading.Event()
        threading.Thread(target=self._report, daemon=True).start()

    @modal.exit()
    def stop(self) -> None:
        self.leaving.set()
        for process in (self.sidecar, self.process):
            if process is not None:
                process.stop()
        self.tunnels.close()
        self.directory.pop(self.engine.name)

    def _claim(self, name: str) -> bool:
        entry = {"url": None, "state": "starting", "detail": "loads the model", "at": time.time()}
        if self.directory.put(name, entry, skip_if_exists=True):
            return True
        if time.time() - self.directory[name]["at"] < LOST_S:
            return False
        self.directory.pop(name)  # its container is gone; whoever writes first has the name
        return bool(self.directory.put(name, entry, skip_if_exists=True))

    def _report(self) -> None:
        while not self.leaving.wait(BEAT_S):
            health = process_health(self.local, self.process)
            entry = {"url": self.engine.url, "state": health.state, "detail": health.detail, "at": time.time()}
            self.directory.put(self.engine.name, entry)
            router = self.config.fleet.modal.router_url or self.directory.get("router", {}).get("url")
            if health.state == "ready" and self.sidecar is None and router:
                self.sidecar = start_sidecar(
                    self.config, self.engine, router_url=router, logs=SCRATCH / "logs", staging=SCRATCH / "staging"
                )


class _RouterContainer:
    """The run's router: a private address, and a public tunnel if both of its tokens guard it."""

    config: ClassVar[Config]

    @modal.enter()
    def start(self) -> None:
        self.tunnels = ExitStack()
        private = self.config.fleet.modal.private
        _, url = _address(private, ROUTER_PORT, self.tunnels)
        public = "" if private else url
        if private and _has_tokens(self.config):
            public = self.tunnels.enter_context(modal.forward(ROUTER_PORT)).url
        workers = [*self.config.router.allowed_workers, _PRIVATE_NETWORK if private else _TUNNELS]
        bound = replace(self.config.router, host="", port=ROUTER_PORT, allowed_workers=workers)  # IPv4 and IPv6
        run = to_file(replace(self.config, router=bound), SCRATCH / "run.yaml")
        command = [sys.executable, "-m", "miles_mixprec.router", "--config", str(run)]
        self.process = EngineProcess(command, env=os.environ, log=SCRATCH / "logs" / "router.log")
        _directory(self.config).put("router", {"url": url, "public_url": public, "at": time.time() + 1e9})

    @modal.exit()
    def stop(self) -> None:
        self.process.stop()
        self.tunnels.close()
