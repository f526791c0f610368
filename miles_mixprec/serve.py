"""Everything of a run but Miles: router, engines, encoders, sidecars, started, watched and stopped together."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import yaml

from miles_mixprec import doctor
from miles_mixprec.config import Config, to_file, to_mapping
from miles_mixprec.errors import CapabilityError, ConfigError, EngineError
from miles_mixprec.guard.signals import CONFIG
from miles_mixprec.providers.base import Engine, Provider, await_engines
from miles_mixprec.providers.local import LocalProvider
from miles_mixprec.providers.process import EngineProcess
from miles_mixprec.providers.static import StaticProvider
from miles_mixprec.weights.checkpoint import decode_checkpoint, encode_checkpoint

REGISTRATION_S = 60.0  # from the start of the sidecars to the last engine in the router


@dataclass
class Services:
    """The running processes beside Miles. `check` them often; `running` stops them."""

    config: Config
    provider: Provider | None = None
    router_url: str = ""
    processes: dict[str, EngineProcess] = field(default_factory=dict)

    def check(self) -> None:
        """Raise EngineError, naming the process, its cause and the remedy, if anything has ended."""
        for name, process in self.processes.items():
            if process.returncode is not None:
                raise EngineError(
                    f"{name} ended with status {process.returncode}: {process.cause()}; see {process.log}, run again"
                )
        assert self.provider is not None
        for engine in self.provider.list():
            health = self.provider.health(engine.name)
            if health.state == "failed":
                raise EngineError(health.detail)

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        if self.provider is not None:
            self.provider.stop()
        for process in self.processes.values():
            process.stop()


@contextmanager
def running(
    config: Config,
    *,
    engine_env: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Services]:
    """Start a run's services, ready to serve version 0, and stop every process of them on the way out.

    Raises EngineError for what does not start, ConfigError for a run folder that holds another run.
    """
    services = Services(config)
    try:
        claim_run_dir(config)
        say("encoding the start weights in every view")
        models = start_models(config)
        services.router_url = _start_router(services)
        say(f"router at {services.router_url}")
        services.provider = _provider(services, engine_env or {}, models)
        for pool in config.fleet.pools:
            services.provider.launch(pool)
        engines = await_engines(
            services.provider, on_ready=lambda engine: say(f"engine {engine.name} at {engine.url}")
        )
        asyncio.run(require_capabilities(config, engines))
        _start_followers(services, engines)
        _await_registration(services, engines)
        yield services
    finally:
        services.stop()


def serve(config: Config) -> None:
    """Run until something ends (EngineError) or the user interrupts."""
    with running(config) as services:
        print(f"point Miles at {services.router_url} (miles-mixprec flags); Ctrl-C ends everything", flush=True)
        try:
            while True:
                services.check()
                time.sleep(1.0)
        except KeyboardInterrupt:
            print("stopping", flush=True)


def claim_run_dir(config: Config) -> None:
    """Write the resolved configuration into the run folder. Raises ConfigError if another one is there."""
    path, values = Path(config.run_dir) / CONFIG, to_mapping(config)
    if path.exists():
        before = yaml.safe_load(path.read_text())
        if changed := sorted(key for key in values if key not in _MAY_CHANGE and before.get(key) != values[key]):
            raise ConfigError(
                f"run_dir={config.run_dir} holds a run with another {', '.join(changed)}; "
                "choose another run_dir, or delete the folder to start over"
            )
    to_file(config, path)


# A resumed run may go on for longer and be watched differently; its router gets a new port.
_MAY_CHANGE = ("updates", "guard", "router")


def start_models(config: Config) -> dict[str, str]:
    """The directory that engines of each view start from: the view itself, or decoded to BF16 where a pool says so.

    Raises ConfigError if two pools of one view disagree on execution.
    """
    fleet, root = config.fleet, Path(config.run_dir) / "start"
    models = {"bf16": fleet.model}
    for view in sorted(set(fleet.views) - {"bf16"}):
        executions = {pool.execution for pool in fleet.pools.values() if pool.view == view}
        if len(executions) > 1:
            raise ConfigError(f"fleet {fleet.name}: pools of view {view} differ in execution; use one per view")
        start = root / view
        if not (start / "config.json").exists():
            encode_checkpoint(Path(fleet.model), view, start)
        if executions == {"dequantized"}:
            encoded, start = start, root / f"{view}-decoded"
            if not (start / "config.json").exists():
                decode_checkpoint(encoded, start)
        models[view] = str(start)
    return models


async def require_capabilities(config: Config, engines: Sequence[Engine]) -> None:
    """Ask every engine for what the arm records. Raises CapabilityError or EngineError for the first that cannot."""
    algo, prompt = config.algo, list(range(1, 9))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        for engine in engines:
            assert engine.url is not None
            try:
                for check in await doctor.check_engine(http, engine.name, engine.url, algo, prompt):
                    if check.status == "failed" and check.name != "clock":  # a busy start answers late
                        found = f"{check.name}: {check.detail}"
                        raise CapabilityError(f"pool {engine.pool}: engine {engine.name}: {found}")
            except doctor.UNREADABLE as error:
                raise EngineError(
                    f"pool {engine.pool}: engine {engine.name} at {engine.url} answers garbage "
                    f"({type(error).__name__}: {error}); is it SGLang 0.5.23 or later?"
                ) from error


def _provider(services: Services, env: Mapping[str, str], models: Mapping[str, str]) -> Provider:
    config = services.config
    match config.fleet.provider:
        case "static":
            return StaticProvider(config.fleet)
        case "local":
            return LocalProvider(config.fleet, config.run_dir, extra_env=env, models=models)
        case "ray":
            import ray

            from miles_mixprec.providers.ray import Launch, RayProvider

            ray.init(address="auto", log_to_driver=False, ignore_reinit_error=True)
            return RayProvider(
                config.fleet,
                # Each actor runs its own sidecar: Ray may restart it anywhere, at another address.
                Launch(
                    config.run_dir,
                    extra_env=env,
                    models=models,
                    sidecar=config,
                    router_url=services.router_url,
                ),
            )
        case other:
            raise ConfigError(
                f"fleet.provider={other}: deployed on its own, see docs/fleet.md; list its URLs as static"
            )


def _start_router(services: Services) -> str:
    ready = Path(services.config.run_dir) / "router.json"
    ready.unlink(missing_ok=True)
    _start(services, "router", "-m", "miles_mixprec.router", "--ready-file", str(ready))
    deadline = time.monotonic() + 60
    while not ready.exists():
        process = services.processes["router"]
        if process.returncode is not None or time.monotonic() > deadline:
            raise EngineError(f"the router does not start: {process.cause()}; see {process.log}")
        time.sleep(0.05)
    address = json.loads(ready.read_text())
    return f"http://{address['host']}:{address['port']}"


def _start_followers(services: Services, engines: Sequence[Engine]) -> None:
    config = services.config
    shards = config.weights.encoders if set(config.fleet.views) != {"bf16"} else 0
    for shard in range(shards):
        _start(services, f"encoder-{shard}", "-m", "miles_mixprec.weights.encode", "--shard", f"{shard}/{shards}")
    if config.fleet.provider == "ray":
        return
    staging = str(Path(config.run_dir) / "staging")
    named = [word for engine in engines for word in ("--engine", f"{engine.name}={engine.url}")]
    _start(
        services,
        "sidecars",
        *("-m", "miles_mixprec.weights.sidecar", "--router", services.router_url, "--staging", staging, *named),
    )


def _await_registration(services: Services, engines: Sequence[Engine]) -> None:
    """Wait until the router knows every engine. Raises EngineError."""
    deadline = time.monotonic() + REGISTRATION_S
    while True:
        with urllib.request.urlopen(f"{services.router_url}/workers", timeout=10) as reply:
            known = {worker["url"].rstrip("/") for worker in json.load(reply)["workers"]}
        missing = [engine for engine in engines if engine.url not in known]
        if not missing:
            return
        services.check()
        if time.monotonic() > deadline:
            raise EngineError(
                f"pool {missing[0].pool}: engine {missing[0].name} is unknown to the router after "
                f"{REGISTRATION_S:g} s; see the sidecars' log in {services.config.run_dir}/logs"
            )
        time.sleep(0.1)


def _start(services: Services, name: str, *words: str) -> None:
    directory = Path(services.config.run_dir)
    services.processes[name] = EngineProcess(
        [sys.executable, *words, "--config", str(directory / CONFIG)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        log=directory / "logs" / f"{name}.log",
    )
