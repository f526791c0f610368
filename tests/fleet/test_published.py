"""The shipped fleets reproduce the published figures."""

import pytest

from miles_mixprec.config import load_fleet
from miles_mixprec.fleet.accelerators import ACCELERATORS, hourly_price
from miles_mixprec.fleet.compatibility import check

# pool: accelerator, per engine, engines, view, slots per engine, slots, share %, list $/h of the pool, $/slot-h
GROUPS = {
    "h100_fp8": ("h100", 1, 8, "fp8", 16, 128, 9.3, 31.6, 0.247),
    "h200_fp8": ("h200", 1, 8, "fp8", 32, 256, 18.6, 36.3, 0.142),
    "b200_nvfp4": ("b200", 1, 8, "nvfp4", 32, 256, 18.6, 50.0, 0.195),
    "b300_nvfp4": ("b300", 1, 8, "nvfp4", 48, 384, 27.9, 56.8, 0.148),
    "a100_bf16": ("a100-80gb", 2, 4, "bf16", 12, 48, 3.5, 20.0, 0.417),
    "rtx_pro_6000_bf16": ("rtx-pro-6000", 2, 4, "bf16", 12, 48, 3.5, 24.2, 0.505),
    "h100_bf16": ("h100", 2, 4, "bf16", 32, 128, 9.3, 31.6, 0.247),
    "h200_bf16": ("h200", 1, 8, "bf16", 16, 128, 9.3, 36.3, 0.284),
}


def test_article_mixed_totals() -> None:
    fleet = load_fleet(["fleet=article_mixed"])
    pools = fleet.pools.values()
    assert list(fleet.pools) == list(GROUPS)
    assert sum(pool.engines for pool in pools) == 52
    assert sum(pool.engines * pool.accelerators_per_engine for pool in pools) == 64
    assert fleet.slots == 1376
    assert sum(pool.engines * hourly_price(pool) for pool in pools) == pytest.approx(286.88)
    assert fleet.context_length == 262144


@pytest.mark.parametrize("name", GROUPS)
def test_article_mixed_groups(name: str) -> None:
    fleet = load_fleet(["fleet=article_mixed"])
    pool = fleet.pools[name]
    accelerator, per_engine, engines, view, per_slots, slots, share, hourly, per_slot = GROUPS[name]
    assert (pool.accelerator, pool.accelerators_per_engine, pool.engines) == (accelerator, per_engine, engines)
    assert (pool.view, pool.slots_per_engine, pool.slots) == (view, per_slots, slots)
    assert pool.kv_cache_dtype == "fp8_e4m3"
    assert round(100 * pool.slots / fleet.slots, 1) == share
    assert round(engines * hourly_price(pool), 1) == pytest.approx(hourly, abs=0.051)
    assert round(hourly_price(pool) / pool.slots_per_engine, 3) == per_slot
    assert pool.sglang["mem_fraction_static"] == (0.65 if name == "a100_bf16" else 0.70)
    assert pool.sglang["mamba_radix_cache_strategy"] == "extra_buffer"


def test_article_mixed_kernels() -> None:
    pools = load_fleet(["fleet=article_mixed"]).pools
    attention = {name: pool.sglang["attention_backend"] for name, pool in pools.items()}
    assert {name for name, backend in attention.items() if backend == "fa3"} == {
        n for n in pools if n[:4] in ("h100", "h200")
    }
    assert {name for name, backend in attention.items() if backend == "trtllm_mha"} == {"b200_nvfp4", "b300_nvfp4"}
    assert {name for name, backend in attention.items() if backend == "flashinfer"} == {
        "a100_bf16",
        "rtx_pro_6000_bf16",
    }
    assert [name for name, pool in pools.items() if pool.sglang["linear_attn_backend"] == "triton"] == ["a100_bf16"]
    running = {name: pool.sglang["max_running_requests"] for name, pool in pools.items()}
    assert list(running.values()) == [24, 32, 32, 64, 16, 16, 48, 24]
    assert running == {name: pool.sglang["cuda_graph_max_bs_decode"] for name, pool in pools.items()}


def test_article_homogeneous() -> None:
    fleet = load_fleet(["fleet=article_homogeneous"])
    (pool,) = fleet.pools.values()
    assert (pool.accelerator, pool.engines, fleet.slots, pool.view, pool.kv_cache_dtype) == (
        "b200",
        42,
        1344,
        "bf16",
        "bf16",
    )
    assert pool.engines * hourly_price(pool) == pytest.approx(262.5)


def test_planned_carries_the_published_load_for_a_quarter_less() -> None:
    fleet = load_fleet(["fleet=planned"])
    hourly = sum(pool.engines * hourly_price(pool) for pool in fleet.pools.values())
    assert fleet.slots >= 1344
    assert hourly <= 0.75 * 262.5


@pytest.mark.parametrize("name", ["article_mixed", "article_homogeneous", "planned"])
def test_shipped_fleets_raise_no_refusal(name: str) -> None:
    assert [finding for finding in check(load_fleet([f"fleet={name}"])) if finding.severity == "refused"] == []


@pytest.mark.parametrize("name", ["cpu_quickstart", "cpu_homogeneous"])
def test_cpu_fleets_load(name: str) -> None:
    assert check(load_fleet([f"fleet={name}", "fleet.model=models/tiny"])) == []


def test_list_prices() -> None:
    prices = {name: data.list_price for name, data in ACCELERATORS.items() if data.list_price}
    assert prices == {"a100-80gb": 2.50, "h100": 3.95, "h200": 4.54, "b200": 6.25, "b300": 7.10, "rtx-pro-6000": 3.03}
