"""A pool as the command line and environment of one SGLang server.

Names are those of SGLang's ServerArgs (checked against 0.5.23). Whatever a pool states under `sglang` wins over
what is derived here, except for the address and the model, which belong to the provider.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Collection, Mapping
from typing import Any

from miles_mixprec.config import Fleet, Pool
from miles_mixprec.errors import ConfigError

RESERVED = ("model_path", "host", "port", "tp_size", "context_length", "kv_cache_dtype", "weight_version")

_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # idle schedulers busy-poll otherwise and starve a laptop
    "mem_fraction_static": 0.1,
    "dtype": "float32",  # exact for BF16 weights, and ten times as fast where the CPU has no BF16 units
}


def sglang_arguments(
    fleet: Fleet,
    pool: Pool,
    *,
    model_path: str,
    port: int,
    host: str = "127.0.0.1",
    known: Collection[str] | None = None,
) -> list[str]:
    """Arguments of `python -m sglang.launch_server` for one engine of `pool`.

    `known` are the ServerArgs of the SGLang that will run (`known_arguments`); None skips that check.
    Raises ConfigError for keys of `pool.sglang` that this SGLang lacks or that the configuration owns.
    """
    name = next(name for name, candidate in fleet.pools.items() if candidate is pool)
    for key in pool.sglang:
        if key in RESERVED:
            raise ConfigError(f"fleet.pools.{name}.sglang.{key}: set by the fleet, not here; remove the key")
        if known is not None and key not in known:
            raise ConfigError(
                f"fleet.pools.{name}.sglang.{key}: this SGLang has no such server argument; "
                "check the spelling or the SGLang version of the engines"
            )
    values: dict[str, Any] = {
        "model_path": model_path,
        "host": host,
        "port": port,
        "context_length": fleet.context_length,
        "dtype": "bfloat16",
        "kv_cache_dtype": pool.kv_cache_dtype,
        "max_running_requests": pool.slots_per_engine,
        "enable_metrics": True,
        "weight_version": "0",
    }
    if pool.accelerator == "cpu":
        values |= _CPU | {"max_total_tokens": pool.slots_per_engine * fleet.context_length}
    else:
        values["tp_size"] = pool.accelerators_per_engine
        if pool.execution == "native" and pool.view == "nvfp4":  # the other formats say so in their own config.json
            values["quantization"] = "modelopt_fp4"
    return [word for key, value in (values | pool.sglang).items() for word in words(key.replace("_", "-"), value)]


def engine_environment(pool: Pool) -> dict[str, str]:
    """Variables that the engines of `pool` need on top of the inherited environment.

    SGLANG_RETURN_ORIGINAL_LOGPROB=0 makes engines report log-probs at the sampling temperature.
    """
    common = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    if pool.accelerator == "cpu":
        common |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
        }
    return common | pool.env


def known_arguments(python: str, env: Mapping[str, str]) -> frozenset[str] | None:
    """ServerArgs names of the SGLang that `python` imports under `env`; None if it imports none. Takes seconds."""
    return _known_arguments(python, tuple(sorted(env.items())))


@functools.lru_cache
def _known_arguments(python: str, env: tuple[tuple[str, str], ...]) -> frozenset[str] | None:
    program = (
        "import argparse, json; from sglang.srt.server_args import ServerArgs; parser = argparse.ArgumentParser();"
        "ServerArgs.add_cli_args(parser); print('\\n' + json.dumps([action.dest for action in parser._actions]))"
    )
    result = subprocess.run([python, "-c", program], env=dict(env), capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return None
    return frozenset(json.loads(result.stdout.splitlines()[-1]))


def words(key: str, value: Any) -> list[str]:
    """The option `--key` on a command line. None and False leave it out; a mapping is written as JSON."""
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{key}"]
    if isinstance(value, (list, tuple)):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
