"""Whether weights and KV cache of a pool fit its accelerators, from the model's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_mixprec.config import Pool
from miles_mixprec.fleet.accelerators import accelerator

# Bytes per weight, block scales included; what is not a linear layer or an expert stays BF16.
BYTES_PER_WEIGHT = {
    "bf16": 2.0,
    "fp8": 1.0 + 4 / 128**2,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp8": 1.0 + 1 / 32,
    "mxfp4": 0.5 + 1 / 32,
}
DEFAULT_MEMORY_FRACTION = 0.85  # of SGLang without mem_fraction_static, about
BYTES_PER_KV = {"auto": 2.0, "bf16": 2.0, "bfloat16": 2.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "fp4_e2m1": 0.5625}


@dataclass(frozen=True)
class ModelShape:
    """What memory depends on. A session also holds one recurrent state if layers use linear attention."""

    weights: float  # number of them
    unquantised: float  # of which stay BF16: embeddings, output head, norms
    kv_values_per_token: int  # over all full-attention layers, K and V
    state_bytes: int  # recurrent state of one sequence, BF16
    head_dim: int


# Counted from the model's published config.json; 71.8 GB in BF16.
KNOWN_MODELS = {
    "Qwen/Qwen3.6-35B-A3B": ModelShape(
        weights=35.9e9, unquantised=1.02e9, kv_values_per_token=10 * 2 * 2 * 256, state_bytes=30 * 32 * 128 * 128 * 2,
        head_dim=256,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """What one engine holds."""

    weights_gb: float
    memory_fraction: float  # mem_fraction_static, ours or the default
    budget_gb: float  # what it leaves for weights, states and KV; the weights fit if they take less
    kv_tokens: int  # what remains for the cache after weights and the states of all slots


def model_shape(model: str) -> ModelShape | None:
    """Shape of a local Hugging Face directory or of a known hub name; None when neither says."""
    config = Path(model) / "config.json"
    if config.is_file():
        return shape_of_config(json.loads(config.read_text()))
    return KNOWN_MODELS.get(model)


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """Shape from config.json of a dense or MoE decoder with full and, optionally, gated linear attention."""
    text = config.get("text_config", config)
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    head_dim = text.get("head_dim") or hidden // text["num_attention_heads"]
    kinds = text.get("layer_types") or ["full_attention"] * layers
    full, linear = sum(kind != "linear_attention" for kind in kinds), kinds.count("linear_attention")
    attention = hidden * head_dim * (2 * text["num_attention_heads"] + 2 * text["num_key_value_heads"])
    key_dim = text.get("linear_num_key_heads", 0) * text.get("linear_key_head_dim", 0)
    value_dim = text.get("linear_num_value_heads", 0) * text.get("linear_value_head_dim", 0)
    linear_attention = hidden * (2 * key_dim + 3 * value_dim)
    experts = text.get("num_experts", 0)
    expert_width = text.get("moe_intermediate_size", 0) * experts + text.get("shared_expert_intermediate_size", 0)
    mlp = 3 * hidden * (expert_width if experts else text["intermediate_size"])
    embeddings = text["vocab_size"] * hidden * (1 if text.get("tie_word_embeddings") else 2)
    return ModelShape(
        weights=full * attention + linear * linear_attention + layers * (mlp + hidden * experts) + embeddings,
        unquantised=embeddings,
        kv_values_per_token=full * 2 * text["num_key_value_heads"] * head_dim,
        state_bytes=linear * value_dim * text.get("linear_key_head_dim", 0) * 2,
        head_dim=head_dim,
    )


def weights_gb(model: ModelShape, view: str) -> float:
    """1e9 bytes of all weights in `view`."""
    return (model.unquantised * 2 + (model.weights - model.unquantised) * BYTES_PER_WEIGHT[view]) / 1e9


def fit(pool: Pool, model: ModelShape) -> Fit:
    """Memory of one engine of `pool`."""
    fraction = pool.sglang.get("mem_fraction_static", DEFAULT_MEMORY_FRACTION)
    budget = accelerator(pool.accelerator).memory_gb * pool.accelerators_per_engine * fraction
    weights = weights_gb(model, "bf16" if pool.execution == "dequantized" else pool.view)
    cache_gb = budget - weights - pool.slots_per_engine * model.state_bytes / 1e9
    per_token = model.kv_values_per_token * BYTES_PER_KV[pool.kv_cache_dtype]
    return Fit(weights, fraction, budget, max(0, int(cache_gb * 1e9 / per_token)))
