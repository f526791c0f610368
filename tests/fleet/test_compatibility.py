"""Every rule refuses what it should, with its message, and lets its neighbour pass."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from miles_mixprec.config import Fleet, Pool
from miles_mixprec.errors import ConfigError
from miles_mixprec.fleet.compatibility import check, refusals, require_compatible, warnings

QWEN = "Qwen/Qwen3.6-35B-A3B"


def fleet(model: str = "unknown/model", context_length: int = 4096, **pool: Any) -> Fleet:
    defaults: dict[str, Any] = {"view": "bf16", "accelerator": "h200", "slots_per_engine": 8}
    return Fleet(name="f", model=model, context_length=context_length, pools={"p": Pool(**(defaults | pool))})


REFUSED = [
    ("native_format", {"view": "nvfp4"}, "h200 executes bf16, fp8, not nvfp4"),
    ("dequantized_needs_quantised", {"execution": "dequantized"}, "bf16 is not one"),
    ("known_cache_type", {"kv_cache_dtype": "int4"}, "kv_cache_dtype=int4 is not one of auto"),
    ("cpu_cache", {"accelerator": "cpu", "kv_cache_dtype": "fp8_e5m2"}, "no fp8_e5m2 KV cache on CPUs; use fp8_e4m3"),
    ("cpu_parallelism", {"accelerator": "cpu", "accelerators_per_engine": 2}, "one process there, use 1"),
    (
        "attention_backend",
        {"sglang": {"attention_backend": "trtllm_mha"}},
        "does not run on h200; use fa3 or flashinfer",
    ),
    (
        "workstation_trtllm_cache",
        {
            "accelerator": "rtx-pro-6000",
            "kv_cache_dtype": "fp8_e4m3",
            "sglang": {"attention_backend": "trtllm_mha"},
        },
        "rejects an FP8 KV cache; use attention_backend=flashinfer",
    ),
    (
        "linear_attention_backend",
        {"accelerator": "a100-80gb", "sglang": {"linear_attn_backend": "flashinfer"}},
        "(needs compute capability 9.0 or newer); use triton",
    ),
    ("moe_backend", {"sglang": {"moe_runner_backend": "flashinfer_trtllm"}}, "does not run on h200; use triton"),
    (
        "cutedsl_is_nvfp4",
        {"accelerator": "b200", "view": "fp8", "sglang": {"moe_runner_backend": "flashinfer_cutedsl"}},
        "executes nvfp4 experts, not fp8; use triton",
    ),
    ("no_speculation", {"sglang": {"speculative_algorithm": "EAGLE"}}, "remove speculative_algorithm"),
    ("temperature_scaled_log_probs", {"env": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}}, "remove it from env"),
]
ALLOWED = [
    {"view": "fp8"},
    {"view": "nvfp4", "execution": "dequantized"},
    {"view": "nvfp4", "accelerator": "b300", "sglang": {"moe_runner_backend": "flashinfer_cutedsl"}},
    {"accelerator": "cpu", "kv_cache_dtype": "fp8_e4m3"},
    {"accelerator": "rtx-pro-6000", "sglang": {"attention_backend": "trtllm_mha"}},
    {"accelerator": "a100-80gb", "sglang": {"linear_attn_backend": "triton"}},
    {"env": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}},
    {"accelerator": "tpu-v7", "hourly_price": 1.0},
]


@pytest.mark.parametrize(("rule", "pool", "message"), REFUSED, ids=[rule for rule, _, _ in REFUSED])
def test_refusal(rule: str, pool: dict[str, Any], message: str) -> None:
    findings = check(fleet(**pool))
    assert [finding.severity for finding in findings] == ["refused"], findings
    assert message in findings[0].message
    with pytest.raises(ConfigError, match=r"^fleet\.pools\.p: "):
        require_compatible(fleet(**pool))


def test_every_rule_has_a_refusal() -> None:
    assert inspect.getsource(refusals).count("yield ") == len(REFUSED)
    assert inspect.getsource(warnings).count("yield ") == 2, "see test_warnings"


@pytest.mark.parametrize("pool", ALLOWED)
def test_allowed(pool: dict[str, Any]) -> None:
    assert check(fleet(**pool)) == []


def test_warnings() -> None:
    slow = check(fleet(accelerator="b200", sglang={"attention_backend": "triton"}))
    assert [(f.severity, "3-4 times slower" in f.message) for f in slow] == [("warning", True)]
    decoded = check(fleet(view="fp8", execution="dequantized"))
    assert [(f.severity, "gives up speed and memory" in f.message) for f in decoded] == [("warning", True)]
    require_compatible(fleet(view="fp8", execution="dequantized"))


def test_unlisted_accelerator_needs_a_price() -> None:
    with pytest.raises(ConfigError, match=r"accelerator=tpu-v7 is not one of cpu, .*; state hourly_price"):
        require_compatible(fleet(accelerator="tpu-v7"))


def test_weights_must_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"71\.8 GB of bf16 weights exceed the 68\.0 GB .*; raise accelerators_per_engine"
    ):
        require_compatible(fleet(QWEN, accelerator="h100"))
    assert check(fleet(QWEN, accelerator="h100", view="fp8")) == []


def test_one_session_must_fit() -> None:
    pool = {"accelerator": "h100", "view": "fp8", "sglang": {"mem_fraction_static": 0.5}}
    with pytest.raises(ConfigError, match="less than one session of context_length=262,144"):
        require_compatible(fleet(QWEN, context_length=262144, **pool))


def test_crowded_cache_warns() -> None:
    findings = check(fleet(QWEN, context_length=262144, view="fp8", slots_per_engine=256))
    assert [finding.severity for finding in findings] == ["warning"]
    assert "expect evictions" in findings[0].message


def test_fa4_refused_at_head_dimension_256() -> None:
    crash = fleet(QWEN, accelerator="b200", sglang={"attention_backend": "fa4"})
    with pytest.raises(ConfigError, match="fa4 crashes at head dimension 256"):
        require_compatible(crash)


def test_fa4_allowed_at_head_dimension_128(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
        "intermediate_size": 128, "vocab_size": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert check(fleet(str(tmp_path), accelerator="b200", sglang={"attention_backend": "fa4"})) == []


def test_more_refusals_are_counted() -> None:
    bad = fleet(view="nvfp4", kv_cache_dtype="int4")
    with pytest.raises(ConfigError, match=r"\(and 1 more\)$"):
        require_compatible(bad)
