"""Which combinations of accelerator, view, kernels and cache cannot work, and why.

`check` finds everything that speaks against a fleet; `require_compatible` turns the first refusal into a ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from miles_mixprec.config import Fleet, Pool
from miles_mixprec.errors import ConfigError
from miles_mixprec.fleet.accelerators import ACCELERATORS, Accelerator
from miles_mixprec.fleet.memory import BYTES_PER_KV, ModelShape, fit, model_shape


@dataclass(frozen=True)
class Finding:
    severity: Literal["refused", "warning"]
    pool: str
    message: str


def check(fleet: Fleet) -> list[Finding]:
    """Everything that speaks against `fleet`, refusals first.

    A pool that states its own price may name an accelerator that is not listed, which then goes unchecked.
    """
    model = model_shape(fleet.model)
    findings: list[Finding] = []
    for name, pool in fleet.pools.items():
        hardware = ACCELERATORS.get(pool.accelerator)
        if hardware is not None:
            findings += [Finding("refused", name, reason) for reason in refusals(pool, hardware)]
            findings += [Finding("warning", name, reason) for reason in warnings(pool, hardware)]
            if model is not None and hardware.memory_gb and pool.kv_cache_dtype in BYTES_PER_KV:
                findings += _memory(name, pool, model, fleet.context_length)
            if model is not None and model.head_dim == 256 and pool.sglang.get("attention_backend") == "fa4":
                reason = "attention_backend=fa4 crashes at head dimension 256, which this model has; use trtllm_mha"
                findings.append(Finding("refused", name, reason))
        elif pool.hourly_price is None:
            reason = (
                f"accelerator={pool.accelerator} is not one of {', '.join(ACCELERATORS)}; "
                "state hourly_price to use it without checks"
            )
            findings.append(Finding("refused", name, reason))
    return sorted(findings, key=lambda finding: finding.severity)


def require_compatible(fleet: Fleet) -> None:
    """Raise ConfigError with the first refusal, if any."""
    refused = [finding for finding in check(fleet) if finding.severity == "refused"]
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise ConfigError(f"fleet.pools.{refused[0].pool}: {refused[0].message}{more}")


def refusals(pool: Pool, hardware: Accelerator) -> Iterator[str]:
    """Why `pool` cannot work on `hardware`, whatever the model; one rule after the other."""
    gpu, cache = pool.accelerator, pool.kv_cache_dtype
    attention = pool.sglang.get("attention_backend", hardware.attention[0])
    linear_attention = pool.sglang.get("linear_attn_backend", hardware.linear_attention[0])
    moe = pool.sglang.get("moe_runner_backend", "auto")
    if pool.execution == "native" and pool.view not in hardware.native_views:
        yield (
            f"{gpu} executes {', '.join(hardware.native_views)}, not {pool.view}; choose one of these "
            "views, or execution=dequantized to decode it to BF16"
        )
    if pool.execution == "dequantized" and pool.view == "bf16":
        yield "execution=dequantized decodes a quantised view, and bf16 is not one; use execution=native"
    if cache not in BYTES_PER_KV:
        yield f"kv_cache_dtype={cache} is not one of {', '.join(BYTES_PER_KV)}"
    if gpu == "cpu" and cache in ("fp8_e5m2", "fp4_e2m1"):
        yield f"SGLang has no {cache} KV cache on CPUs; use fp8_e4m3 or auto"
    if gpu == "cpu" and pool.accelerators_per_engine != 1:
        yield f"accelerators_per_engine={pool.accelerators_per_engine} on CPUs; an engine is one process there, use 1"
    if attention not in hardware.attention:
        yield f"attention_backend={attention} does not run on {gpu}; use {' or '.join(hardware.attention)}"
    if hardware.compute_capability == 120 and attention == "trtllm_mha" and cache.startswith("fp8"):
        yield "TRT-LLM attention of compute capability 12.0 rejects an FP8 KV cache; use attention_backend=flashinfer"
    if linear_attention not in hardware.linear_attention:
        why = " (needs compute capability 9.0 or newer)" if hardware.compute_capability == 80 else ""
        options = " or ".join(hardware.linear_attention)
        yield f"linear_attn_backend={linear_attention} does not run on {gpu}{why}; use {options}"
    if moe != "auto" and moe not in hardware.moe:
        yield f"moe_runner_backend={moe} does not run on {gpu}; use {' or '.join(hardware.moe)}"
    if moe == "flashinfer_cutedsl" and pool.view != "nvfp4":
        yield f"moe_runner_backend=flashinfer_cutedsl executes nvfp4 experts, not {pool.view}; use triton"
    if pool.sglang.get("speculative_algorithm"):
        yield (
            "speculative decoding changes the distribution that the recorded log-probs describe; "
            "remove speculative_algorithm"
        )
    if pool.env.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "0").lower() not in ("0", "false"):
        yield "SGLANG_RETURN_ORIGINAL_LOGPROB makes engines report log-probs at temperature 1; remove it from env"


def warnings(pool: Pool, hardware: Accelerator) -> Iterator[str]:
    """What works and is slow."""
    if hardware.compute_capability in (100, 103) and pool.sglang.get("attention_backend") == "triton":
        yield "triton attention was measured 3-4 times slower than trtllm_mha on data-centre Blackwell"
    if pool.execution == "dequantized" and pool.view != "bf16" and pool.view in hardware.native_views:
        yield f"{pool.accelerator} executes {pool.view} natively; execution=dequantized gives up speed and memory"


def _memory(name: str, pool: Pool, model: ModelShape, context: int) -> Iterator[Finding]:
    held = fit(pool, model)
    per_session = held.kv_tokens // pool.slots_per_engine
    if held.weights_gb >= held.budget_gb:
        reason = (
            f"{pool.accelerator} x {pool.accelerators_per_engine}: {held.weights_gb:.1f} GB of {pool.view} weights "
            f"exceed the {held.budget_gb:.1f} GB that mem_fraction_static={held.memory_fraction} leaves; "
            "raise accelerators_per_engine or quantise"
        )
        yield Finding("refused", name, reason)
    elif held.kv_tokens < context:
        reason = (
            f"{held.kv_tokens:,} tokens of KV cache remain beside {held.weights_gb:.1f} GB of weights, less than one "
            f"session of context_length={context:,}; raise accelerators_per_engine or shorten contexts"
        )
        yield Finding("refused", name, reason)
    elif per_session < context / 8:
        reason = (
            f"{pool.slots_per_engine} sessions leave {per_session:,} tokens of KV cache each, under an eighth of "
            f"context_length={context:,}; expect evictions"
        )
        yield Finding("warning", name, reason)
