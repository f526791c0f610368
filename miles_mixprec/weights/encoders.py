"""Views of a model: which tensors a format quantises, under which names, and the `quantization_config` that says so.

A *unit* is the least set of BF16 tensors that must be encoded together (a gate and its up projection share
NVFP4's global scale). Units are independent of each other, so encoders may be sharded over them.

Names and layouts are those that stock SGLang 0.5.23 loads (`fp8.py`, `modelopt_quant.py`, `mxfp4.py` under
`srt/layers/quantization`). Stacked experts, as transformers 5 writes them, come out per expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_mixprec.errors import StoreError
from miles_mixprec.weights import formats

# Kept in BF16 by every view, as in the public FP8 and NVFP4 recipes of the Qwen3.5 and Qwen3.6 MoE models: embeddings
# and head, norms, router gates, the decay, beta and convolution parts of linear attention, vision tower, MTP layers.
_IGNORED = re.compile(
    r"embed|lm_head|norm|(^|\.)visual\.|vision_tower|mm_projector|(^|\.)mtp\.|\.(gate|router|shared_expert_gate|eh_proj"
    r"|weights_proj)\.|linear_attn\.(conv1d|in_proj_a|in_proj_b|in_proj_ba)\."
)
_ANY = re.compile("")
_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
_MLP = re.compile(r"\.(gate_proj|up_proj|gate_up_proj|down_proj|w1|w2|w3)\.weight$")
_STACKED = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)(\.weight)?$")
_PARTS = re.compile(r"\.(weight_scale_inv|weight_scale_2|weight_scale|input_scale)$")
_GATE_OR_UP = re.compile(r"\.(gate_proj|up_proj|w1|w3)\.weight$")


@dataclass(frozen=True)
class Format:
    """How one view stores the matrices that it takes."""

    parts: tuple[str, ...]  # what `encode` gives and `decode` wants; each replaces `weight` at the end of the name
    encode: Callable[[Tensor, Tensor], tuple[Tensor, ...]]  # (matrix, amax of the matrices that share its scale)
    decode: Callable[..., Tensor]
    group: int  # the rows' length must be a multiple of it
    takes: re.Pattern[str]
    config: Mapping[str, Any]  # quantization_config,
    kept: str  # and the key in it of the modules that stay in BF16


_FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_MXFP4_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": formats.MX_GROUP,
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": "torch.uint8",
}
FORMATS: dict[str, Format] = {
    "fp8": Format(
        parts=("weight", "weight_scale_inv"),
        encode=lambda weight, amax: formats.encode_fp8(weight),
        decode=formats.decode_fp8,
        group=1,
        takes=_ANY,
        config=_FP8_CONFIG | {"weight_block_size": [formats.FP8_BLOCK, formats.FP8_BLOCK]},
        kept="modules_to_not_convert",
    ),
    "mxfp8": Format(
        parts=("weight", "weight_scale_inv"),
        encode=lambda weight, amax: formats.encode_mxfp8(weight),
        decode=formats.decode_mxfp8,
        group=formats.MX_GROUP,
        takes=_ANY,
        config=_FP8_CONFIG
        | {"quant_method": "mxfp8", "weight_block_size": [1, formats.MX_GROUP], "scale_fmt": "ue8m0"},
        kept="modules_to_not_convert",
    ),
    "nvfp4": Format(
        parts=("weight", "weight_scale", "weight_scale_2"),
        encode=formats.encode_nvfp4,
        decode=formats.decode_nvfp4,
        group=formats.NVFP4_GROUP,
        takes=_MLP,  # four bits only where the weights are, as Miles' own NVFP4 conversion does
        config={"quant_method": "modelopt_fp4", "quant_algo": "W4A16_NVFP4", "group_size": formats.NVFP4_GROUP},
        kept="ignore",
    ),
    "mxfp4": Format(
        parts=("weight", "weight_scale"),
        encode=lambda weight, amax: formats.encode_mxfp4(weight),
        decode=formats.decode_mxfp4,
        group=formats.MX_GROUP,
        takes=_EXPERT,  # SGLang reads MXFP4 for routed experts only
        config={
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": _MXFP4_WEIGHTS,
                    "input_activations": None,
                    "output_activations": None,
                }
            },
            "quantization_status": "compressed",
        },
        kept="ignore",
    ),
}


def units(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The names of a BF16 version, grouped into units, in a fixed order."""
    grouped: dict[str, list[str]] = {}
    for name in sorted(names):
        grouped.setdefault(_fused(name), []).append(name)
    return [tuple(group) for group in grouped.values()]


def encode(view: str, unit: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Encode one unit of BF16 tensors into the named tensors of `view`.

    Matrices that the view quantises become `weight` and its scales; everything else passes through, matrices as
    BF16 and vectors in their own dtype. Raises StoreError, naming the tensor, for NaN or infinity and for shapes
    that the format cannot hold.
    """
    tensors = {name: t for stacked, tensor in unit.items() for name, t in _unstack(stacked, canonical(tensor))}
    shared_amax: dict[str, Tensor] = {}  # of the matrices that the engine fuses
    for name, tensor in tensors.items():
        amax = _checked_amax(name, tensor)
        shared_amax[_fused(name)] = torch.maximum(amax, shared_amax.get(_fused(name), amax))
    if view == "bf16":
        return tensors
    form = FORMATS[view]
    encoded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not is_quantised(view, name, tensor):
            encoded[name] = tensor
            continue
        if tensor.shape[-1] % form.group:
            raise StoreError(
                f"view {view}: {name} has rows of {tensor.shape[-1]}, not a multiple of {form.group}; "
                "use another view for this model"
            )
        base = name.removesuffix("weight")
        parts = form.encode(tensor, shared_amax[_fused(name)])
        encoded |= {base + part: t for part, t in zip(form.parts, parts, strict=True)}
        if view == "nvfp4" and _EXPERT.search(name):  # a parameter of SGLang's MoE loader; activations stay in BF16
            encoded[f"{base}input_scale"] = torch.ones(())
    return encoded


def decode(view: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """BF16 tensors of a view's, one matrix at a time; the inverse of `encode`.

    `tensors` must hold every part of each of its matrices.
    """
    form = FORMATS.get(view)
    for name in sorted(tensors):
        weight = matrix_of(name)
        base = weight.removesuffix("weight")
        if form is None or base + form.parts[1] not in tensors:
            yield name, tensors[name]
        elif name == weight:
            yield name, form.decode(*(tensors[base + part] for part in form.parts))


def matrix_of(name: str) -> str:
    """The weight that an encoded name is a part of; the name itself for plain tensors."""
    return _PARTS.sub(".weight", name)


def is_quantised(view: str, name: str, tensor: Tensor) -> bool:
    """Whether `view` stores the BF16 tensor `name` in its own format."""
    return (
        view != "bf16"
        and tensor.dim() == 2
        and name.endswith(".weight")
        and not _IGNORED.search(name)
        and FORMATS[view].takes.search(name) is not None
    )


def view_config(view: str, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The `config.json` of a view: the BF16 model's own with the `quantization_config` of the encoded `names`.

    Raises StoreError where the view would hold nothing in its format.
    """
    if view == "bf16":
        return dict(config)
    names = set(names)
    weights = {name for name in names if name.endswith(".weight")}
    quantised = {matrix_of(name) for name in names if _PARTS.search(name)}
    if not quantised:
        raise StoreError(f"view {view}: no tensor of this model has that format; use another view")
    kept = sorted(name.removesuffix(".weight") for name in weights - quantised)
    form = FORMATS[view]
    return {**config, "quantization_config": {**form.config, form.kept: kept}}


def canonical(tensor: Tensor) -> Tensor:
    """The tensor as the BF16 version stores it: contiguous on the CPU, matrices in BF16, vectors in their own dtype.

    Vectors (norms, biases, `A_log`, score-correction biases) are kept because models hold some in FP32 on purpose.
    """
    dtype = torch.bfloat16 if tensor.dim() >= 2 and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype).contiguous()


def _unstack(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    match = _STACKED.match(name)
    if match is None or tensor.dim() != 3:
        return [(name, tensor)]
    base, kind, _ = match.groups()
    if kind == "down_proj":
        return [(f"{base}.{i}.down_proj.weight", expert) for i, expert in enumerate(tensor)]
    rows = tensor.shape[1] // 2
    return [
        (f"{base}.{i}.{part}_proj.weight", half)
        for i, expert in enumerate(tensor)
        for part, half in (("gate", expert[:rows]), ("up", expert[rows:]))
    ]


def _fused(name: str) -> str:
    """The same for a gate and its up projection, the name itself for others."""
    return _GATE_OR_UP.sub(".gate_up", name)


def _checked_amax(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        return torch.zeros(())
    low, high = tensor.aminmax()
    amax = torch.maximum(-low, high).float()
    if not amax.isfinite():
        raise StoreError(f"tensor {name} holds NaN or infinity; the update that made it must not be published")
    return amax
