"""Which tensors a view quantises, how they are named, and that SGLang's own loaders agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import weight_models as models

from miles_mixprec.errors import StoreError
from miles_mixprec.weights import encoders, files
from miles_mixprec.weights.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint, view_of

ROOT = Path(__file__).parents[2]
LAYER = "model.layers.0"
BLOCK_QUANTISED = {
    f"{LAYER}.self_attn.q_proj.weight",
    f"{LAYER}.linear_attn.in_proj_qkv.weight",
    *(f"{LAYER}.mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")),
    *(f"{LAYER}.mlp.experts.{e}.{part}_proj.weight" for e in range(4) for part in ("gate", "up", "down")),
}
MLP_QUANTISED = {name for name in BLOCK_QUANTISED if ".mlp." in name}
QUANTISED = {
    "bf16": set(),
    "fp8": BLOCK_QUANTISED,
    "mxfp8": BLOCK_QUANTISED,
    "nvfp4": MLP_QUANTISED,
    "mxfp4": {name for name in MLP_QUANTISED if ".experts." in name},
}


def encode_all(view: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    units = encoders.units(tensors)
    return {n: t for unit in units for n, t in encoders.encode(view, {name: tensors[name] for name in unit}).items()}


@pytest.mark.parametrize("view", QUANTISED)
def test_a_view_quantises_what_the_public_recipes_do(view: str) -> None:
    tensors = models.moe()
    encoded = encode_all(view, tensors)
    assert {name for name in tensors if encoders.is_quantised(view, name, tensors[name])} == QUANTISED[view]
    for name in tensors.keys() - QUANTISED[view]:
        assert torch.equal(encoded[name], tensors[name]) and encoded[name].dtype == tensors[name].dtype
    assert {encoders.matrix_of(name) for name in encoded} == tensors.keys()


@pytest.mark.parametrize("view", QUANTISED)
def test_stacked_experts_encode_like_experts_of_their_own(view: str) -> None:
    apart, stacked = encode_all(view, models.moe()), encode_all(view, models.moe(stacked=True))
    assert apart.keys() == stacked.keys()
    for name, tensor in apart.items():
        assert files.tensor_checksum(tensor) == files.tensor_checksum(stacked[name].contiguous()), name


def test_gate_and_up_share_the_nvfp4_global_scale() -> None:
    tensors = models.moe()
    gate, up = f"{LAYER}.mlp.experts.1.gate_proj", f"{LAYER}.mlp.experts.1.up_proj"
    tensors[f"{gate}.weight"][0, 0] = 8.0
    encoded = encode_all("nvfp4", tensors)
    assert encoded[f"{gate}.weight_scale_2"] == encoded[f"{up}.weight_scale_2"]
    assert encoded[f"{gate}.weight_scale_2"].item() == pytest.approx(8 / 448 / 6)
    assert encoded[f"{gate}.weight_scale_2"] != encoded[f"{LAYER}.mlp.experts.1.down_proj.weight_scale_2"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("view", QUANTISED)
@pytest.mark.parametrize(
    "name", [f"{LAYER}.mlp.experts.2.up_proj.weight", "model.norm.weight", f"{LAYER}.linear_attn.A_log"]
)
def test_what_is_not_finite_is_refused_by_name(view: str, name: str, bad: float) -> None:
    tensors = models.moe()
    tensors[name].view(-1)[3] = bad
    with pytest.raises(StoreError, match=name):
        encode_all(view, tensors)


def test_rows_that_the_format_cannot_hold_are_refused_by_name() -> None:
    with pytest.raises(StoreError, match=r"experts\.0\.up_proj\.weight has rows of 40"):
        encoders.encode("nvfp4", {"m.mlp.experts.0.up_proj.weight": torch.ones(8, 40, dtype=torch.bfloat16)})


def test_a_view_that_would_quantise_nothing_is_refused() -> None:
    with pytest.raises(StoreError, match="view mxfp4"):
        encoders.view_config("mxfp4", {}, ["model.layers.0.mlp.up_proj.weight"])


def test_a_trainer_in_fp32_publishes_matrices_in_bf16_and_vectors_as_they_are() -> None:
    encoded = encoders.encode("bf16", {"w.weight": torch.ones(4, 4), "norm.weight": torch.ones(4)})
    assert (encoded["w.weight"].dtype, encoded["norm.weight"].dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("view", QUANTISED)
def test_a_checkpoint_encodes_and_decodes(view: str, tmp_path: Path) -> None:
    tensors = models.moe(stacked=True)
    encode_checkpoint(models.directory(tmp_path / "model", tensors), view, tmp_path / view)
    decode_checkpoint(tmp_path / view, tmp_path / "decoded")
    encoded, decoded = Checkpoint(tmp_path / view), Checkpoint(tmp_path / "decoded")
    assert view_of(encoded.config) == view and "quantization_config" not in decoded.config
    assert (tmp_path / "decoded" / "tokenizer.json").exists()
    original = encode_all("bf16", tensors)
    assert set(decoded) == original.keys()
    for name, tensor in original.items():
        if name in QUANTISED[view]:
            assert decoded[name].dtype == torch.bfloat16
            assert 0 < (decoded[name].float() - tensor.float()).abs().max() <= 0.2 * tensor.float().abs().max()
        else:
            assert torch.equal(decoded[name], tensor)


def test_a_quantised_checkpoint_is_not_encoded_again(tmp_path: Path) -> None:
    encode_checkpoint(models.directory(tmp_path / "bf16", models.moe()), "fp8", tmp_path / "fp8")
    with pytest.raises(StoreError, match="quantised already"):
        encode_checkpoint(tmp_path / "fp8", "nvfp4", tmp_path / "again")


SGLANG = """
import json, sys
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.utils import is_layer_skipped
configs = json.load(sys.stdin)
out = {}
for view, config in configs.items():
    method = config["quant_method"]
    quant = QUANTIZATION_METHODS[method].from_config(config)
    quant.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    def skipped(prefix):
        if method == "modelopt_fp4":
            return quant.is_layer_excluded(prefix)
        ignored = quant.ignored_layers if method in ("fp8", "mxfp8") else quant.ignore
        return is_layer_skipped(prefix, ignored, quant.packed_modules_mapping)
    layer = "model.layers.0."
    out[view] = {
        "name": quant.get_name(),
        "block": getattr(quant, "weight_block_size", None) or getattr(quant, "group_size", None),
        "w4a16": getattr(quant, "is_w4a16", None),
        "skipped": {p: skipped(layer + p) for p in (
            "mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_a", "self_attn.q_proj", "mlp.experts")},
    }
print(json.dumps(out))
"""


def test_sglang_reads_the_quantization_configs_as_meant() -> None:
    sglang = Path(os.environ.get("SGLANG_0523", ROOT / ".venv" / "sglang-0.5.23"))
    if not (sglang / "sglang").exists():
        pytest.skip("SGLang 0.5.23 is not there; set SGLANG_0523 to a directory that holds it")
    configs = {
        view: encoders.view_config(view, {}, encode_all(view, models.moe()))["quantization_config"]
        for view in ("fp8", "mxfp8", "nvfp4", "mxfp4")
    }
    shims = ROOT / "examples" / "cpu_quickstart" / "shims"
    env = os.environ | {"PYTHONPATH": f"{shims}:{sglang}", "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-c", SGLANG], input=json.dumps(configs), env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    read = json.loads(run.stdout.splitlines()[-1])
    assert [read[view]["name"] for view in configs] == ["fp8", "mxfp8", "modelopt_fp4", "compressed_tensors"]
    assert (read["fp8"]["block"], read["mxfp8"]["block"], read["nvfp4"]["block"]) == ([128, 128], [1, 32], 16)
    assert read["nvfp4"]["w4a16"] is True
    for view, answer in read.items():
        expected = {"mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_a"}
        expected |= {"self_attn.q_proj"} if view in ("nvfp4", "mxfp4") else set()
        assert {prefix for prefix, skipped in answer["skipped"].items() if skipped} == expected, view
