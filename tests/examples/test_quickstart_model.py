"""The quickstart's variant with outlier channels: the same function, and dear to NVFP4."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from miles_mixprec.weights import encoders

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "cpu_quickstart"
NORM = "model.layers.0.post_attention_layernorm.weight"
READERS = ["mlp.gate.weight", *(f"mlp.experts.{e}.{part}_proj.weight" for e in range(2) for part in ("gate", "up"))]
OTHERS = ["mlp.experts.0.down_proj.weight", "self_attn.q_proj.weight"]


def with_outliers(directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    save_file(tensors, directory / "model.safetensors")
    code = f"import model, pathlib; model.add_outliers(pathlib.Path({str(directory)!r}), [32, 64])"
    path = os.pathsep.join(map(str, (QUICKSTART / "shims", QUICKSTART)))
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, check=True, timeout=300)
    return load_file(directory / "model.safetensors")


def nvfp4_error(weight: torch.Tensor, scales: torch.Tensor) -> float:
    """Relative error of the encoded matrix behind a norm whose channels are `scales` times smaller."""
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    decoded = dict(encoders.decode("nvfp4", encoders.encode("nvfp4", {name: weight})))[name]
    return float((((decoded - weight) / scales).float().norm() / (weight / scales).float().norm()).item())


def test_outliers_leave_the_function_alone_and_cost_nvfp4_most_of_its_precision(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    made = {f"model.layers.0.{name}": torch.randn(64, 64, generator=generator).bfloat16() for name in READERS + OTHERS}
    before = made | {NORM: torch.rand(64, generator=generator).bfloat16() + 0.5}
    after = with_outliers(tmp_path, before)
    scales = before[NORM] / after[NORM]
    assert scales.tolist() == [{0: 32.0, 16: 64.0, 32: 32.0, 48: 64.0}.get(channel, 1.0) for channel in range(64)]
    for name in (f"model.layers.0.{name}" for name in READERS):
        assert torch.equal(after[name] * after[NORM], before[name] * before[NORM]), name
    for name in (f"model.layers.0.{name}" for name in OTHERS):
        assert torch.equal(after[name], before[name]), name
    plain, outliers = before["model.layers.0.mlp.experts.0.up_proj.weight"], torch.ones(64)
    assert nvfp4_error(plain, outliers) < 0.15
    assert nvfp4_error(after["model.layers.0.mlp.experts.0.up_proj.weight"], scales) > 0.5
