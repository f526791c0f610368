"""What each accelerator can do and what it costs: the data behind the compatibility rules and the planner.

Prices are on-demand list prices in $ per accelerator-hour as of PRICES_AS_OF; override them per pool with
`hourly_price`. Backends are those seen to work with SGLang on hybrid-attention MoE models of the Qwen3.6 family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date

from miles_mixprec.config import Pool
from miles_mixprec.errors import ConfigError

PRICES_AS_OF = date(2026, 10, 13)


@dataclass(frozen=True)
class Accelerator:
    """`attention`, `moe` and `linear_attention` name SGLang backends, the usual choice first."""

    memory_gb: float  # 1e9 bytes per accelerator
    compute_capability: int  # 80: Ampere, 90: Hopper, 100 and 103: data-centre Blackwell, 120: workstation Blackwell
    native_views: tuple[str, ...]  # formats that its matrix units execute
    attention: tuple[str, ...]
    linear_attention: tuple[str, ...]
    moe: tuple[str, ...]
    list_price: float
    modal_gpu: str
    ray_resource: str  # custom resource that Ray nodes with this accelerator offer


_H100 = Accelerator(
    memory_gb=80,
    compute_capability=90,
    native_views=("bf16", "fp8"),
    attention=("fa3", "flashinfer", "triton"),
    linear_attention=("flashinfer", "triton"),
    moe=("triton", "deep_gemm", "cutlass", "flashinfer_cutlass", "marlin"),
    list_price=3.95,
    modal_gpu="H100!",
    ray_resource="accelerator_type:H100",
)
_B200 = Accelerator(
    memory_gb=180,
    compute_capability=100,
    native_views=("bf16", "fp8", "nvfp4", "mxfp8", "mxfp4"),
    attention=("trtllm_mha", "flashinfer", "triton", "fa4"),
    linear_attention=("flashinfer", "triton", "cutedsl"),
    moe=("triton", "flashinfer_cutedsl", "flashinfer_trtllm", "flashinfer_cutlass", "deep_gemm", "cutlass", "marlin"),
    list_price=6.25,
    modal_gpu="B200",
    ray_resource="accelerator_type:B200",
)
ACCELERATORS: dict[str, Accelerator] = {
    "cpu": Accelerator(
        memory_gb=0,
        compute_capability=0,
        native_views=("bf16",),
        attention=("torch_native",),
        linear_attention=("torch_native",),
        moe=("triton",),
        list_price=0.0,
        modal_gpu="",
        ray_resource="CPU",
    ),
    "a100-80gb": Accelerator(
        memory_gb=80,
        compute_capability=80,
        native_views=("bf16",),
        attention=("flashinfer", "triton"),
        linear_attention=("triton",),
        moe=("triton", "marlin"),
        list_price=2.50,
        modal_gpu="A100-80GB",
        ray_resource="accelerator_type:A100-80G",
    ),
    "h100": _H100,
    "h200": replace(_H100, memory_gb=141, list_price=4.54, modal_gpu="H200", ray_resource="accelerator_type:H200"),
    "b200": _B200,
    "b300": replace(
        _B200,
        memory_gb=270,
        compute_capability=103,
        list_price=7.10,
        modal_gpu="B300",
        ray_resource="accelerator_type:B300",
    ),
    "rtx-pro-6000": Accelerator(
        memory_gb=96,
        compute_capability=120,
        native_views=("bf16", "fp8", "nvfp4", "mxfp4"),
        attention=("flashinfer", "triton", "trtllm_mha"),
        linear_attention=("flashinfer", "triton"),
        moe=("triton", "flashinfer_cutlass", "marlin"),
        list_price=3.03,
        modal_gpu="RTX-PRO-6000",
        ray_resource="accelerator_type:RTX-PRO-6000",
    ),
}


def accelerator(name: str) -> Accelerator:
    """The data of `name`. Raises ConfigError if there is none."""
    if name not in ACCELERATORS:
        raise ConfigError(f"accelerator {name}: unknown; use one of {', '.join(ACCELERATORS)}")
    return ACCELERATORS[name]


def hourly_price(pool: Pool) -> float:
    """$ per hour of one engine of `pool`, at its own price or else its accelerator's list price.

    Raises ConfigError for an unknown accelerator without a price.
    """
    price = accelerator(pool.accelerator).list_price if pool.hourly_price is None else pool.hourly_price
    return pool.accelerators_per_engine * price
