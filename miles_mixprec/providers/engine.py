"""Starting one engine of a pool on this machine, with or without its sidecar."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_mixprec.config import Config, Fleet, to_file
from miles_mixprec.fleet.arguments import engine_environment, known_arguments, sglang_arguments
from miles_mixprec.providers.base import Engine, Health, responds
from miles_mixprec.providers.process import EngineProcess, free_port

SGLANG = ("-m", "sglang.launch_server")


def start_engine(
    fleet: Fleet,
    pool_name: str,
    index: int,
    *,
    logs: Path,
    host: str = "127.0.0.1",
    port: int | None = None,
    model_path: str | None = None,
    python: str = sys.executable,
    server: Sequence[str] = SGLANG,
    extra_env: Mapping[str, str] | None = None,
    grace_s: float = 10.0,
) -> tuple[Engine, EngineProcess]:
    """Run `python *server <SGLang arguments>`; the log is `logs/engine-<pool>-<index>.log`.

    The environment is ours, then the pool's, then `extra_env`. Raises ConfigError for arguments that the SGLang of
    that Python lacks.
    """
    pool = fleet.pools[pool_name]
    env = {**os.environ, **engine_environment(pool), **(extra_env or {})}
    port = port or free_port(host)
    arguments = sglang_arguments(
        fleet,
        pool,
        model_path=model_path or fleet.model,
        port=port,
        host=host,
        known=known_arguments(python, env) if pool.sglang and tuple(server) == SGLANG else None,
    )
    address = f"[{host}]" if ":" in host else host
    engine = Engine(pool_name, index, f"http://{address}:{port}")
    log = logs / f"engine-{pool_name}-{index}.log"
    return engine, EngineProcess([python, *server, *arguments], env=env, log=log, grace_s=grace_s)


def start_sidecar(config: Config, engine: Engine, *, router_url: str, logs: Path, staging: Path) -> EngineProcess:
    """Run the sidecar that keeps `engine` on the newest weights and registers it with the router."""
    run = to_file(config, logs / f"run-{engine.pool}-{engine.index}.yaml")
    command = [sys.executable, "-m", "miles_mixprec.weights.sidecar", "--config", str(run), "--router", router_url]
    command += ["--staging", str(staging), "--engine", f"{engine.name}={engine.url}"]
    return EngineProcess(command, env=os.environ, log=logs / f"sidecar-{engine.pool}-{engine.index}.log")


def process_health(engine: Engine, process: EngineProcess) -> Health:
    """State of an engine that runs on this machine."""
    if process.returncode is not None:
        return Health(
            "failed",
            f"pool {engine.pool}: engine {engine.name} exited with status {process.returncode}: {process.cause()}; "
            f"see {process.log}, then correct fleet.pools.{engine.pool} (sglang, env) or the engines' Python",
        )
    assert engine.url is not None
    return Health("ready") if responds(engine.url) else Health("starting", process.cause())
