import pytest

from miles_mixprec.config import Pool, load_fleet
from miles_mixprec.fleet.memory import KNOWN_MODELS, fit, model_shape, shape_of_config, weights_gb

QWEN = KNOWN_MODELS["Qwen/Qwen3.6-35B-A3B"]


def test_published_checkpoint_size() -> None:
    assert weights_gb(QWEN, "bf16") == pytest.approx(71.8, abs=0.05)
    assert weights_gb(QWEN, "nvfp4") < weights_gb(QWEN, "mxfp8") / 1.5 < weights_gb(QWEN, "fp8")


def test_shape_of_a_dense_config_counts_its_parameters() -> None:
    shape = shape_of_config(
        {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 32, "intermediate_size": 128, "vocab_size": 384,
        }
    )  # fmt: skip
    per_layer = 64 * 32 * (4 + 2 + 2 + 4) + 3 * 64 * 128
    assert shape.weights == 2 * per_layer + 2 * 384 * 64
    assert shape.kv_values_per_token == 2 * 2 * 2 * 32
    assert shape.state_bytes == 0


def test_shape_of_the_hybrid_moe_config_matches_the_known_model() -> None:
    shape = shape_of_config(
        {
            "text_config": {
                "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
                "head_dim": 256, "vocab_size": 248320,
                "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
                "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
                "linear_value_head_dim": 128, "num_experts": 256, "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
            }
        }
    )  # fmt: skip
    assert shape.kv_values_per_token == QWEN.kv_values_per_token
    assert shape.state_bytes == QWEN.state_bytes
    assert shape.weights == pytest.approx(QWEN.weights, rel=0.05)


def test_cache_shrinks_with_wider_values_and_more_slots() -> None:
    narrow = fit(Pool(view="fp8", accelerator="h200", slots_per_engine=32, kv_cache_dtype="fp8_e4m3"), QWEN)
    wide = fit(Pool(view="fp8", accelerator="h200", slots_per_engine=32, kv_cache_dtype="bf16"), QWEN)
    crowded = fit(Pool(view="fp8", accelerator="h200", slots_per_engine=64, kv_cache_dtype="fp8_e4m3"), QWEN)
    assert narrow.kv_tokens == pytest.approx(2 * wide.kv_tokens, rel=1e-6)
    assert crowded.kv_tokens < narrow.kv_tokens


def test_decoded_views_take_bf16_memory() -> None:
    native = Pool(view="fp8", accelerator="h200", slots_per_engine=8)
    decoded = Pool(view="fp8", accelerator="h200", slots_per_engine=8, execution="dequantized")
    assert fit(decoded, QWEN).weights_gb > 1.9 * fit(native, QWEN).weights_gb


def test_the_baseline_is_full_at_its_published_load() -> None:
    """Published: one B200 in BF16 fills its KV cache at 32 sessions; contexts ended at a median of 64K to 94K."""
    (pool,) = load_fleet(["fleet=article_homogeneous"]).pools.values()
    assert 64_000 < fit(pool, QWEN).kv_tokens / 32 < 94_000


def test_unknown_models_have_no_shape() -> None:
    assert model_shape("somebody/else") is None
