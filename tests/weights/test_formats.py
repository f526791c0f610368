"""The bytes of every format against the reference that its docstring names, and the error that the format allows."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from miles_mixprec.weights import formats

torchao_mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same_bytes(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(bits(ours), bits(theirs))


def from_bits(array: np.ndarray) -> Tensor:
    """Any finite BF16 values, denormals, zeros of both signs and the largest included."""
    tensor = torch.from_numpy(array.copy()).view(torch.bfloat16)
    return torch.where(tensor.isfinite(), tensor, torch.zeros((), dtype=torch.bfloat16))


def matrices(group: int, max_rows: int = 5, max_groups: int = 5) -> st.SearchStrategy[Tensor]:
    shapes = st.tuples(st.integers(1, max_rows), st.integers(1, max_groups).map(lambda n: n * group))
    return shapes.flatmap(lambda shape: hnp.arrays(np.int16, shape)).map(from_bits)


def hard_cases(group: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(96, 8 * group, generator=generator)
    outlier = normal.clone()
    outlier[3, 5] = 3e38
    return [
        (normal * 0.02).bfloat16(),
        torch.zeros(4, 2 * group, dtype=torch.bfloat16),
        outlier.bfloat16(),
        (normal[:1] * 1e-39).bfloat16(),
        (normal * torch.exp(20 * torch.randn(normal.shape, generator=generator))).clamp(-3e38, 3e38).bfloat16(),
        (torch.arange(group * 64).reshape(64, group) / 16 - 20).bfloat16(),  # many ties
    ]


def check_mxfp8(weight: Tensor) -> None:
    mode = torchao_mx.ScaleCalculationMode.RCEIL
    scale, data = torchao_mx.to_mx(weight, torch.float8_e4m3fn, formats.MX_GROUP, mode)
    ours, our_scale = formats.encode_mxfp8(weight)
    assert same_bytes(ours, data) and same_bytes(our_scale, scale)


def check_mxfp4(weight: Tensor) -> None:
    mode = torchao_mx.ScaleCalculationMode.EVEN
    scale, data = torchao_mx.to_mx(weight, torch.float4_e2m1fn_x2, formats.MX_GROUP, mode)
    ours, our_scale = formats.encode_mxfp4(weight)
    assert same_bytes(ours, data) and same_bytes(our_scale, scale)


@settings(max_examples=60, deadline=None)
@given(matrices(formats.MX_GROUP))
def test_mx_formats_give_torchao_s_bytes_for_any_values(weight: Tensor) -> None:
    check_mxfp8(weight)
    check_mxfp4(weight)


@pytest.mark.parametrize("case", range(6))
def test_mx_formats_give_torchao_s_bytes_for_hard_cases(case: int) -> None:
    check_mxfp8(hard_cases(formats.MX_GROUP)[case])
    check_mxfp4(hard_cases(formats.MX_GROUP)[case])


COMPRESSED_TENSORS = """
from compressed_tensors.compressors import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import generate_mx_scales
args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
weight = hard_cases(32)[0]
exponents = generate_mx_scales(weight.float().unflatten(1, (-1, 32)).abs().amax(-1))
state = {"weight": weight.float(), "weight_scale": 2.0 ** (exponents - 127)}
packed = MXFP4PackedCompressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args))
out = [[packed["weight_packed"], packed["weight_scale"]]]
"""


def test_mxfp4_gives_compressed_tensors_bytes() -> None:
    pytest.importorskip("transformers")
    [(packed, scale)] = reference(COMPRESSED_TENSORS)
    ours, our_scale = formats.encode_mxfp4(hard_cases(formats.MX_GROUP)[0])
    assert bits(ours).tolist() == packed and bits(our_scale).tolist() == scale


def nvfp4_reference(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4 as Transformer Engine's reference states it, comparison by comparison."""
    amax = weight.float().abs().max()
    encode = torch.minimum(torch.div(torch.tensor(448.0) * 6.0, amax), torch.tensor(torch.finfo(torch.float32).max))
    decode = torch.div(torch.tensor(1.0), encode)
    groups = weight.reshape(len(weight), -1, 16)
    scales = groups.abs().amax(-1, keepdim=True).float() * (encode * torch.reciprocal(torch.tensor(6.0)))
    scales = scales.clamp(-448, 448).to(torch.float8_e4m3fn)
    factor = torch.minimum(torch.div(1.0, scales.float() * decode), torch.tensor(torch.finfo(torch.float32).max))
    scaled = (groups.float() * factor).clamp(-6, 6).reshape(weight.shape)
    code = torch.zeros(scaled.shape, dtype=torch.uint8)
    bounds = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    for i, bound in enumerate(bounds):  # a tie goes to the even code
        code += (scaled.abs() >= bound) if i % 2 else (scaled.abs() > bound)
    code += (scaled < 0).to(torch.uint8) * 8
    return code[:, ::2] + code[:, 1::2] * 16, scales.squeeze(-1), decode


@settings(max_examples=60, deadline=None)
@given(matrices(formats.NVFP4_GROUP))
def test_nvfp4_gives_the_reference_s_bytes_for_any_values(weight: Tensor) -> None:
    ours = formats.encode_nvfp4(weight, weight.float().abs().max())
    assert all(same_bytes(a, b) for a, b in zip(ours, nvfp4_reference(weight), strict=True))


@pytest.mark.parametrize("case", range(6))
def test_nvfp4_gives_the_reference_s_bytes_for_hard_cases(case: int) -> None:
    weight = hard_cases(formats.NVFP4_GROUP)[case]
    ours = formats.encode_nvfp4(weight, weight.float().abs().max())
    assert all(same_bytes(a, b) for a, b in zip(ours, nvfp4_reference(weight), strict=True))


# sha256 over codes, scales and the global scale, computed with transformer_engine 2.20.2's
# NVFP4QuantizerRef._quantize_blockwise_reference(x, amax, 16, 1, pow_2_scales=False, eps=0.0) on the same inputs
TRANSFORMER_ENGINE = "99badde398e5f894197a8d81f3162fa873a35176a30b87a1d8c98c7c3a70899b"


def nvfp4_digest(encode) -> str:
    digest = hashlib.sha256()
    for weight in hard_cases(formats.NVFP4_GROUP):
        for part in encode(weight):
            digest.update(bits(part).numpy().tobytes())
    return digest.hexdigest()


def test_nvfp4_gives_transformer_engine_s_recorded_bytes() -> None:
    assert nvfp4_digest(lambda w: formats.encode_nvfp4(w, w.float().abs().max())) == TRANSFORMER_ENGINE


FP8_KERNEL = """
from miles.utils.fp8_kernel import _blockwise_cast_to_fp8_triton as kernel, fp8_max, fp8_min
out = []
for weight in fp8_cases():
    (m, n), grid = weight.shape, tuple(-(-size // 128) for size in weight.shape)
    # Triton's interpreter rounds wrongly to e4m3, so the kernel stores FP32 and torch does the last cast
    data, scale = torch.empty(m, n), torch.empty(grid)
    strides = weight.stride() + data.stride() + scale.stride()
    kernel[grid](weight, data, scale, *strides, m, n, 1e-10, fp8_min, fp8_max, BLOCK_M=128, BLOCK_N=128)
    out.append((data.to(torch.float8_e4m3fn), scale))
"""


def reference(code: str) -> list[list[list[int]]]:
    """Bytes of the tensors that `code` leaves in `out`, from a process that can import the reference on a CPU."""
    shims = Path(__file__).parents[2] / "examples" / "cpu_quickstart" / "shims"
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(shims), str(Path(__file__).parent), *filter(None, sys.path)]),
    }
    head = "import json, torch\nfrom test_formats import bits, fp8_cases, hard_cases\n"
    tail = "\nprint(json.dumps([[bits(part).tolist() for part in parts] for parts in out]))"
    run = subprocess.run([sys.executable, "-c", head + code + tail], env=env, capture_output=True, text=True)
    if "No module named 'miles.utils" in run.stderr or "No module named 'compressed_tensors" in run.stderr:
        pytest.skip("the reference is not installed: " + run.stderr.strip().splitlines()[-1])
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def fp8_cases() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(130, 200, generator=generator) * 0.02  # ends in partial blocks
    wide[0, 0], wide[129, 199] = 1e30, 1e-30
    return [
        wide.bfloat16(),
        torch.zeros(1, 16, dtype=torch.bfloat16),
        (torch.randn(3, 129, generator=generator) * 1e-39).bfloat16(),
        (torch.arange(64 * 64).reshape(64, 64) / 64 - 30).bfloat16(),
    ]


@pytest.mark.miles
def test_fp8_gives_the_bytes_of_miles_own_kernel() -> None:
    pytest.importorskip("triton")
    for weight, (data, scale) in zip(fp8_cases(), reference(FP8_KERNEL), strict=True):
        ours, our_scale = formats.encode_fp8(weight)
        assert bits(ours).tolist() == data
        assert bits(our_scale).tolist() == scale


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 130), st.integers(1, 130))
    .flatmap(lambda shape: hnp.arrays(np.int16, shape))
    .map(from_bits)
)
def test_fp8_is_the_rounding_of_each_block_scaled_to_448(weight: Tensor) -> None:
    data, scale = formats.encode_fp8(weight)
    n, k = weight.shape
    assert data.shape == weight.shape and scale.shape == (-(-n // 128), -(-k // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].float()
            expected = block.abs().max().clamp(min=1e-10) / 448
            assert scale[i, j] == expected
            q = (block * (1 / expected)).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert same_bytes(data[128 * i : 128 * i + 128, 128 * j : 128 * j + 128], q)


ROUND_TRIPS = {  # the error is below either share: of the value itself, or of the largest in its group
    "fp8": (lambda w: formats.decode_fp8(*formats.encode_fp8(w)), 2**-4, 2**-10 / 448),
    "mxfp8": (lambda w: formats.decode_mxfp8(*formats.encode_mxfp8(w)), 2**-4, 2**-10 / 224),
    "mxfp4": (lambda w: formats.decode_mxfp4(*formats.encode_mxfp4(w)), 0.25, 0.25 / 3.5),
    "nvfp4": (lambda w: formats.decode_nvfp4(*formats.encode_nvfp4(w, w.float().abs().max())), 0.25, 0.25 / 5.6),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_a_round_trip_errs_by_at_most_half_a_step_of_the_format(name: str, scale: float) -> None:
    round_trip, of_value, of_largest = ROUND_TRIPS[name]
    weight = (torch.randn(128, 128, generator=torch.Generator().manual_seed(1)) * scale).bfloat16()
    magnitude = weight.float().abs()
    group = {"fp8": 128, "nvfp4": 16}.get(name, 32)
    largest = magnitude.unflatten(1, (-1, group)).amax(-1, keepdim=True).expand(-1, -1, group).reshape(128, 128)
    if name == "fp8":
        largest = magnitude.max()
    error = (round_trip(weight).float() - weight.float()).abs()
    assert (error <= torch.maximum(of_value * magnitude, of_largest * largest) + 2**-8 * magnitude).all()


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_encoding_what_was_decoded_changes_little(name: str) -> None:
    round_trip, _, _ = ROUND_TRIPS[name]
    weight = round_trip(torch.randn(128, 128, generator=torch.Generator().manual_seed(2)).bfloat16())
    assert torch.allclose(round_trip(weight).float(), weight.float(), rtol=0.02, atol=1e-3)
