"""Which combinations of accelerator, view, kernels and cache cannot work, and why.

Every rule is a function from a pool (and its accelerator and model) to the reason against it, or None. `check` runs
all of them; `require_compatible` turns the first refusal into a ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from miles_mixprec.config import Fleet, Pool
from miles_mixprec.errors import ConfigError
from miles_mixprec.fleet.accelerators import ACCELERATORS, Accelerator
from miles_mixprec.fleet.memory import ModelShape, fit, model_shape

Severity = Literal["refused", "warning"]
Rule = Callable[[Pool, Accelerator], "str | None"]
KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")


@dataclass(frozen=True)
class Finding:
    severity: Severity
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
        if hardware is None:
            findings += _unlisted(name, pool)
            continue
        findings += _apply(RULES, "refused", name, pool, hardware) + _apply(WARNINGS, "warning", name, pool, hardware)
        if model is not None and hardware.memory_gb:
            findings += _memory(fleet, name, pool, model)
            if pool.sglang.get("attention_backend") == "fa4" and model.head_dim == 256:
                reason = "attention_backend=fa4 crashes at head dimension 256, which this model has; use trtllm_mha"
                findings.append(Finding("refused", name, reason))
    return sorted(findings, key=lambda finding: finding.severity)


def require_compatible(fleet: Fleet) -> None:
    """Raise ConfigError with the first refusal, if any."""
    refused = [finding for finding in check(fleet) if finding.severity == "refused"]
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise ConfigError(f"fleet.pools.{refused[0].pool}: {refused[0].message}{more}")


def native_format(pool: Pool, hardware: Accelerator) -> str | None:
    if pool.execution == "native" and pool.view not in hardware.native_views:
        return (
            f"{pool.accelerator} executes {', '.join(hardware.native_views)}, not {pool.view}; choose one of these "
            "views, or execution=dequantized to decode it to BF16"
        )
    return None


def dequantized_needs_quantised(pool: Pool, hardware: Accelerator) -> str | None:
    if pool.execution == "dequantized" and pool.view == "bf16":
        return "execution=dequantized decodes a quantised view, and bf16 is not one; use execution=native"
    return None


def known_cache_type(pool: Pool, hardware: Accelerator) -> str | None:
    if pool.kv_cache_dtype not in KV_DTYPES:
        return f"kv_cache_dtype={pool.kv_cache_dtype} is not one of {', '.join(KV_DTYPES)}"
    return None


def cpu_cache(pool: Pool, hardware: Accelerator) -> str | None:
    if pool.accelerator == "cpu" and pool.kv_cache_dtype in ("fp8_e5m2", "fp4_e2m1"):
        return f"SGLang has no {pool.kv_cache_dtype} KV cache on CPUs; use fp8_e4m3 or auto"
    return None


def cpu_parallelism(pool: Pool, hardware: Accelerator) -> str | None:
    if pool.accelerator == "cpu" and pool.accelerators_per_engine != 1:
        return f"accelerators_per_engine={pool.accelerators_per_engine} on CPUs; an engine is one process there, use 1"
    return None


def attention_backend(pool: Pool, hardware: Accelerator) -> str | None:
    backend = pool.sglang.get("attention_backend", hardware.attention[0])
    if backend not in hardware.attention:
        return f"attention_backend={backend} does not run on {pool.accelerator}; use {' or '.join(hardware.attention)}"
    return None


def workstation_trtllm_cache(pool: Pool, hardware: Accelerator) -> str | None:
    is_trtllm = pool.sglang.get("attention_backend") == "trtllm_mha"
    if hardware.compute_capability == 120 and is_trtllm and pool.kv_cache_dtype.startswith("fp8"):
        return "TRT-LLM attention of compute capability 12.0 rejects an FP8 KV cache; use attention_backend=flashinfer"
    return None


def linear_attention_backend(pool: Pool, hardware: Accelerator) -> str | None:
    backend = pool.sglang.get("linear_attn_backend", hardware.linear_attention[0])
    if backend not in hardware.linear_attention:
        why = " (needs compute capability 9.0 or newer)" if hardware.compute_capability == 80 else ""
        options = " or ".join(hardware.linear_attention)
        return f"linear_attn_backend={backend} does not run on {pool.accelerator}{why}; use {options}"
    return None


def moe_backend(pool: Pool, hardware: Accelerator) -> str | None:
    backend = pool.sglang.get("moe_runner_backend", "auto")
    if backend != "auto" and backend not in hardware.moe:
        return f"moe_runner_backend={backend} does not run on {pool.accelerator}; use {' or '.join(hardware.moe)}"
    return None


def cutedsl_is_nvfp4(pool: Pool, hardware: Accelerator) -> str | None:
    if pool.sglang.get("moe_runner_backend") == "flashinfer_cutedsl" and pool.view != "nvfp4":
        return f"moe_runner_backend=flashinfer_cutedsl executes nvfp4 experts, not {pool.view}; use triton"
    return None


def no_speculation(pool: Pool, hardware: Accelerator) -> str | None:
    if pool.sglang.get("speculative_algorithm"):
        return (
            "speculative decoding changes the distribution that the recorded log-probs describe; "
            "remove speculative_algorithm"
        )
    return None


def temperature_scaled_log_probs(pool: Pool, hardware: Accelerator) -> str | None:
    if pool.env.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "0").lower() not in ("0", "false"):
        return "SGLANG_RETURN_ORIGINAL_LOGPROB makes engines report log-probs at temperature 1; remove it from env"
    return None


def slow_triton(pool: Pool, hardware: Accelerator) -> str | None:
    if hardware.compute_capability in (100, 103) and pool.sglang.get("attention_backend") == "triton":
        return "triton attention was measured 3-4 times slower than trtllm_mha on data-centre Blackwell"
    return None


def decoded_on_gpu(pool: Pool, hardware: Accelerator) -> str | None:
    if pool.execution == "dequantized" and pool.view != "bf16" and pool.view in hardware.native_views:
        return f"{pool.accelerator} executes {pool.view} natively; execution=dequantized gives up speed and memory"
    return None


RULES: tuple[Rule, ...] = (
    native_format,
    dequantized_needs_quantised,
    known_cache_type,
    cpu_cache,
    cpu_parallelism,
    attention_backend,
    workstation_trtllm_cache,
    linear_attention_backend,
    moe_backend,
    cutedsl_is_nvfp4,
    no_speculation,
    temperature_scaled_log_probs,
)
WARNINGS: tuple[Rule, ...] = (slow_triton, decoded_on_gpu)


def _apply(rules: tuple[Rule, ...], severity: Severity, name: str, pool: Pool, hardware: Accelerator) -> list[Finding]:
    reasons = (rule(pool, hardware) for rule in rules)
    return [Finding(severity, name, reason) for reason in reasons if reason]


def _unlisted(name: str, pool: Pool) -> list[Finding]:
    if pool.hourly_price is not None:
        return []
    known = ", ".join(ACCELERATORS)
    reason = f"accelerator={pool.accelerator} is not one of {known}; state hourly_price to use it without checks"
    return [Finding("refused", name, reason)]


def _memory(fleet: Fleet, name: str, pool: Pool, model: ModelShape) -> list[Finding]:
    if pool.kv_cache_dtype not in KV_DTYPES:
        return []
    try:
        held = fit(pool, model)
    except ConfigError as error:
        return [Finding("refused", name, str(error))]
    if held.sessions(fleet.context_length) < 1:
        reason = (
            f"{held.kv_tokens:,} tokens of KV cache remain beside {held.weights_gb:.1f} GB of weights, less than one "
            f"session of context_length={fleet.context_length:,}; raise accelerators_per_engine or shorten contexts"
        )
        return [Finding("refused", name, reason)]
    per_session = held.kv_tokens // pool.slots_per_engine
    if per_session < fleet.context_length / 8:
        reason = (
            f"{pool.slots_per_engine} sessions leave {per_session:,} tokens of KV cache each, under an eighth of "
            f"context_length={fleet.context_length:,}; expect evictions"
        )
        return [Finding("warning", name, reason)]
    return []
