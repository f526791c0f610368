"""Arithmetic of the number formats: one BF16 matrix to the bytes of a format, and back.

Every `encode_*` takes a contiguous BF16 matrix `[n, k]`, works in slices that stay in the cache, and gives
byte for byte what the reference named in its docstring gives. Every `decode_*` gives BF16. No input is checked
here for NaN or infinity; `encoders` does that once per tensor.

Formats: OCP FP8 e4m3fn; OCP Microscaling Formats v1.0 (e8m0 scales per 32); NVFP4 (e2m1 elements, e4m3 scales
per 16, one FP32 scale per matrix).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

FP8_BLOCK = 128
MX_GROUP = 32
NVFP4_GROUP = 16
E4M3_MAX = 448.0
E2M1_MAX = 6.0
_EPS = 1e-10  # of Miles' FP8 kernel: the smallest maximum that a block may have
_SLICE = 1 << 17  # elements: 512 KiB of FP32, the L2 cache of one core
_ABS_BITS = 0x7FFF
_E2M1_PAIRS = torch.tensor(
    [
        [(-1.0 if c & 8 else 1.0) * (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[c & 7] for c in (b & 15, b >> 4)]
        for b in range(256)
    ]
)


def _slices(rows: int, row_elements: int) -> Iterator[slice]:
    step = max(_SLICE // row_elements, 1)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _max_bits(groups: Tensor, dim: int) -> Tensor:
    """Bits of the largest |x| along `dim` of a BF16 tensor; integer order is float order once the sign is gone."""
    return (groups.view(torch.int16) & _ABS_BITS).amax(dim)


def encode_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 e4m3 in 128x128 blocks.

    Returns `weight` e4m3 `[n, k]` and `weight_scale_inv` fp32 `[ceil(n/128), ceil(k/128)]`.
    x ~ q * scale, scale = max(|block|, 1e-10) / 448, q = e4m3(x * (1 / scale)).
    Reference: `miles.utils.fp8_kernel.blockwise_cast_to_fp8_triton` with block size [128, 128].
    """
    n, k = weight.shape
    column_blocks = -(-k // FP8_BLOCK)
    quantized = torch.empty((n, k), dtype=torch.float8_e4m3fn)
    scales = torch.empty((-(-n // FP8_BLOCK), column_blocks), dtype=torch.float32)
    columns = torch.zeros(column_blocks * FP8_BLOCK, dtype=torch.int16)
    for i, start in enumerate(range(0, n, FP8_BLOCK)):
        band = weight[start : start + FP8_BLOCK]
        columns[:k] = _max_bits(band, 0)
        amax = columns.view(column_blocks, FP8_BLOCK).amax(1).view(torch.bfloat16).float()
        torch.div(amax.clamp_(min=_EPS), E4M3_MAX, out=scales[i])
        factor = scales[i].reciprocal().repeat_interleave(FP8_BLOCK)[:k]
        for rows in _slices(len(band), k):
            quantized[start + rows.start : start + rows.stop] = band[rows] * factor
    return quantized, scales


def decode_fp8(quantized: Tensor, scales: Tensor) -> Tensor:
    """BF16 `[n, k]` of `encode_fp8`'s result: bf16(q * scale), the product in FP32."""
    n, k = quantized.shape
    weight = torch.empty((n, k), dtype=torch.bfloat16)
    for i, start in enumerate(range(0, n, FP8_BLOCK)):
        rows = slice(start, start + FP8_BLOCK)
        weight[rows] = quantized[rows].float() * scales[i].repeat_interleave(FP8_BLOCK)[:k]
    return weight


def encode_mxfp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8 e4m3. Returns `weight` e4m3 `[n, k]` and `weight_scale_inv` uint8 e8m0 `[n, k/32]`; k % 32 == 0.

    x ~ q * 2^(e - 127), the power of two rounded up from max(|group|) / 448 so that nothing saturates.
    Reference: torchao `prototype.mx_formats.mx_tensor.to_mx(elem_dtype=e4m3, scaling_mode=RCEIL)`, the rule of
    cuBLAS and Transformer Engine.
    """
    n, k = weight.shape
    groups = weight.view(-1, MX_GROUP)
    quantized = torch.empty(groups.shape, dtype=torch.float8_e4m3fn)
    exponents = torch.empty(len(groups), dtype=torch.uint8)
    for rows in _slices(len(groups), MX_GROUP):
        bits = _max_bits(groups[rows], 1).int()
        # 448 = 1.75 * 2^8, and 1.75 is mantissa 96 of 128
        exponent = ((bits >> 7) - 8 + (bits & 0x7F).gt(96)).clamp_(min=0)
        exponents[rows] = exponent.to(torch.uint8)
        # the reference leaves groups unscaled that are too small for the exponent
        factor = ((254 - exponent) << 23).view(torch.float32).masked_fill_(exponent == 0, 1.0)
        quantized[rows] = (groups[rows] * factor[:, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    return quantized.view(n, k), exponents.view(n, k // MX_GROUP)


def decode_mxfp8(quantized: Tensor, exponents: Tensor) -> Tensor:
    """BF16 `[n, k]` of `encode_mxfp8`'s result."""
    weight = torch.empty(quantized.shape, dtype=torch.bfloat16)
    groups, factors = quantized.view(-1, MX_GROUP), _power_of_two(exponents).view(-1, 1)
    for rows in _slices(len(groups), MX_GROUP):
        weight.view(-1, MX_GROUP)[rows] = groups[rows].float() * factors[rows]
    return weight


def encode_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 e2m1.

    Returns `weight` uint8 `[n, k/2]`, low nibble first, and `weight_scale` uint8 e8m0 `[n, k/32]`; k % 32 == 0.
    The exponent is that of max(|group|), rounded to one mantissa bit, less 2 (6 = 1.5 * 2^2).
    Reference: compressed-tensors `MXFP4PackedCompressor` on its `generate_mx_scales`; the same bytes as torchao
    `to_mx(elem_dtype=float4_e2m1fn_x2, scaling_mode=EVEN)`.
    """
    n, k = weight.shape
    groups = weight.view(-1, MX_GROUP)
    packed = torch.empty((len(groups), MX_GROUP // 2), dtype=torch.uint8)
    exponents = torch.empty(len(groups), dtype=torch.uint8)
    for rows in _slices(len(groups), MX_GROUP):
        bits = _max_bits(groups[rows], 1).int()
        exponent = ((bits >> 7) - 2 + (bits & 0x7F).ge(96)).clamp_(min=0)
        exponents[rows] = exponent.to(torch.uint8)
        factor = ((254 - exponent.clamp_(min=1)) << 23).view(torch.float32)
        packed[rows] = _e2m1(groups[rows] * factor[:, None], negative_zero=True)
    return packed.view(n, k // 2), exponents.view(n, k // MX_GROUP)


def decode_mxfp4(packed: Tensor, exponents: Tensor) -> Tensor:
    """BF16 `[n, k]` of `encode_mxfp4`'s result."""
    return _decode_e2m1(packed, _power_of_two(exponents), MX_GROUP)


def encode_nvfp4(weight: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4 for weights of a W4A16 product. `amax` fp32 `[]`: max |x| of all matrices that share the global scale.

    Returns `weight` uint8 `[n, k/2]`, low nibble first, `weight_scale` e4m3 `[n, k/16]` and `weight_scale_2` fp32
    `[]`; k % 16 == 0. x ~ e2m1 * weight_scale * weight_scale_2.
    Reference: Transformer Engine 2.20 `NVFP4QuantizerRef._quantize_blockwise_reference` with 1x16 tiles, as called by
    Miles' `quantizer_nvfp4` (no 2-D tiles, no Hadamard transform, no stochastic rounding).
    """
    n, k = weight.shape
    largest = torch.finfo(torch.float32).max  # for an all-zero matrix or group
    encode = torch.div(torch.tensor(E4M3_MAX * E2M1_MAX), amax).clamp(max=largest)
    global_scale = encode.reciprocal()
    multiplier = encode * torch.tensor(E2M1_MAX).reciprocal()
    groups = weight.view(-1, NVFP4_GROUP)
    packed = torch.empty((len(groups), NVFP4_GROUP // 2), dtype=torch.uint8)
    scales = torch.empty(len(groups), dtype=torch.float8_e4m3fn)
    for rows in _slices(len(groups), NVFP4_GROUP):
        group_max = _max_bits(groups[rows], 1).view(torch.bfloat16).float()
        scales[rows] = (group_max * multiplier).clamp_(max=E4M3_MAX)
        factor = (scales[rows].float() * global_scale).reciprocal_().clamp_(max=largest)
        packed[rows] = _e2m1(groups[rows] * factor[:, None], negative_zero=False)
    return packed.view(n, k // 2), scales.view(n, k // NVFP4_GROUP), global_scale


def decode_nvfp4(packed: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """BF16 `[n, k]` of `encode_nvfp4`'s result."""
    return _decode_e2m1(packed, scales.float() * global_scale, NVFP4_GROUP)


def _e2m1(scaled: Tensor, *, negative_zero: bool) -> Tensor:
    """FP32 `[m, g]`, which is overwritten, to nearest-even e2m1 codes, two per byte `[m, g/2]`.

    The representable values have steps 1/2, 1 and 2 on [0, 2], [2, 4] and [4, 6]; rounding to each step and taking
    the least code picks the right one. `negative_zero`: whether -0.0 keeps its sign bit.
    """
    sign = (scaled.view(torch.int32) >> 31).to(torch.uint8) if negative_zero else (scaled < 0).view(torch.uint8)
    magnitude = scaled.abs_().clamp_(max=E2M1_MAX)
    code = (magnitude * 2).round_()
    step = magnitude.round()
    torch.minimum(code, step.add_(2), out=code)
    torch.mul(magnitude, 0.5, out=step).round_().add_(4)
    torch.minimum(code, step, out=code)
    nibbles = code.to(torch.uint8).bitwise_or_(sign.bitwise_and_(1).bitwise_left_shift_(3))
    pairs = nibbles.view(torch.int16)  # little endian: the even column is the low byte
    return (pairs | (pairs >> 4)).to(torch.uint8)


def _decode_e2m1(packed: Tensor, scales: Tensor, group: int) -> Tensor:
    n, half = packed.shape
    weight = torch.empty((n, 2 * half), dtype=torch.bfloat16)
    for rows in _slices(n, 2 * half):
        values = _E2M1_PAIRS.index_select(0, packed[rows].reshape(-1).int()).view(-1, half * 2 // group, group)
        weight[rows] = values.mul_(scales[rows, :, None]).view(-1, 2 * half)
    return weight


def _power_of_two(exponents: Tensor) -> Tensor:
    """FP32 2^(e - 127) of e8m0 bytes; e = 0 is the subnormal 2^-127."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
