"""The main job: `bash run.sh [key=value ...]`. Prepares what is missing, starts the fleet and Miles, shows, reports.

python main.py updates=5 algo=grpo fleet=cpu_homogeneous run_dir=runs/try
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import model
import task
from rich.console import Console

from miles_mixprec import config as configuration
from miles_mixprec import flags, miles, serve
from miles_mixprec.config import Config
from miles_mixprec.errors import ConfigError, EngineError, MixprecError
from miles_mixprec.guard import live, watch
from miles_mixprec.guard.report import write_report
from miles_mixprec.guard.signals import read_signals
from miles_mixprec.providers.process import EngineProcess, free_port

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SHIMS = HERE / "shims"
ENGINE_SGLANG = Path(os.environ.get("MIXPREC_ENGINE_SGLANG", ROOT / ".venv" / "sglang-0.5.23"))
CACHE = ROOT / ".cache" / "quickstart"
PROMPTS, TRAIN_SEED, EVAL_SEED = 4096, 11, 12

console = Console()


class RunStopped(MixprecError):
    """The guard saw a collapse and guard.action=stop."""


def main(overrides: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        config = configuration.load("quickstart", overrides, conf_dir=HERE / "conf")
        config.run_dir = str(Path(config.run_dir).resolve())
        config.router.port = config.router.port or free_port()
        if _finished(config):
            console.print(f"{config.run_dir} holds this run, finished; raise updates= to go on")
        else:
            prepare(config)
            run(config)
        _report(config)
        return 0
    except MixprecError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; everything is stopped, run the same command to go on")
        return 130


def prepare(config: Config) -> None:
    """Model, prompts and Megatron checkpoint, each built once and then reused."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if Path(config.fleet.model).name not in model.OUTLIERS:
        known = " or ".join(str(CACHE.relative_to(ROOT) / name) for name in model.OUTLIERS)
        raise ConfigError(f"fleet.model={config.fleet.model}: not a model that the quickstart builds; use {known}")
    model.build(Path(config.fleet.model))
    length = model.RECIPE["row_length"]
    task.write_prompts(CACHE / "prompts.jsonl", PROMPTS, TRAIN_SEED, length)
    task.write_prompts(CACHE / "held_out.jsonl", 32, EVAL_SEED, length)
    converted = Path(config.miles_args["ref-load"], "latest_checkpointed_iteration.txt")
    built = Path(config.fleet.model, "recipe.json").stat().st_mtime
    if not converted.exists() or converted.stat().st_mtime < built:
        console.print("converting the model to a Megatron checkpoint")
        _convert(config)


def _convert(config: Config) -> None:
    paths = {
        "load": None,
        "ref-load": None,
        "save": config.miles_args["ref-load"],
        "hf-checkpoint": config.fleet.model,
    }
    words = [word for key, value in {**config.miles_args, **paths}.items() for word in flags.words(key, value)]
    command = [sys.executable, str(HERE / "convert.py"), *words]
    log = CACHE / "convert.log"
    with log.open("wb") as output:
        environment = _trainer_environment() | {"MASTER_PORT": str(free_port())}
        status = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode
    if status:
        raise EngineError(f"the conversion to Megatron ended with status {status}; see {log}")


def run(config: Config) -> None:
    """Fleet and Miles together, until the updates are done or something ends."""
    with serve.running(
        config,
        engine_env={"PYTHONPATH": f"{SHIMS}{os.pathsep}{ENGINE_SGLANG}"},
        say=console.print,
    ) as services:
        flags.write_files(config)
        command = [sys.executable, str(HERE / "driver.py"), *flags.miles_flags(config)]
        directory = Path(config.run_dir)
        (directory / "miles_command.txt").write_text("\n".join(command) + "\n")
        trainer = EngineProcess(command, env=_trainer_environment(), log=directory / "logs" / "miles.log")
        services.processes["miles"] = trainer
        console.print(f"Miles {miles.features().generation} starts; its log is {trainer.log}")
        _watch(config, services, trainer)


def _watch(config: Config, services: serve.Services, trainer: EngineProcess) -> None:
    """Show the run and guard it. Raises EngineError as soon as any process has ended before its time."""
    done = threading.Event()
    view = threading.Thread(target=live.follow, args=(config.run_dir, done), kwargs={"console": console}, daemon=True)
    view.start()
    drain = watch.drain_through(services.router_url, config.router)
    seen = 0
    try:
        while trainer.returncode is None:
            services.check()
            updates = len(read_signals(config.run_dir))
            if config.guard.enabled and updates > seen:
                seen = updates
                decision = watch.check(config.run_dir, config.guard, drain)
                if decision is not None and decision.stop:
                    raise RunStopped(
                        f"the guard ended the run after update {decision.update}: {'; '.join(decision.reasons)}"
                    )
            time.sleep(0.5)
        if trainer.returncode != 0:
            raise EngineError(f"Miles ended with status {trainer.returncode}: {trainer.cause()}; see {trainer.log}")
    finally:
        done.set()
        view.join(timeout=10)
    del services.processes["miles"]


def _trainer_environment() -> dict[str, str]:
    path = [str(SHIMS), str(HERE), str(ROOT)]
    if source := os.environ.get("MILES_SOURCE"):
        path += [source, str(ENGINE_SGLANG.parent / "sglang-0.5.16")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "MIXPREC_CPU_TRAINER": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MILES_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "no_proxy": "127.0.0.1,localhost",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
    }


def _finished(config: Config) -> bool:
    return len(read_signals(config.run_dir)) >= config.updates


def _report(config: Config) -> None:
    console.print(f"report: {write_report(config.run_dir)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
