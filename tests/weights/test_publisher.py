"""The publisher under Miles' own gather, on the installed Miles and on the checkout that MILES_SOURCE names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
import weight_models as models
import yaml
import zstandard
from weight_runs import run_config

from miles_mixprec.errors import CapabilityError, StoreError
from miles_mixprec.weights import disk_delta, files, publisher, store
from miles_mixprec.weights.store import Store

HERE = Path(__file__).parent
SHIMS = HERE.parents[1] / "examples" / "cpu_quickstart" / "shims"


def train(phases: list[tuple[Path, int, list[int]]], rendezvous: Path, source: str | None) -> list[dict[str, object]]:
    """Run two trainer ranks through `phases` (run directory, ranks, steps); returns what rank 0 printed."""
    path = [str(SHIMS), *([source] if source else []), str(HERE.parents[1])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    work = json.dumps([[str(root / "run.yaml"), world, steps] for root, world, steps in phases])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "miles_ranks.py"), str(rank), str(rendezvous), work],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate() for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "".join(error[-3000:] for _, error in outputs)
    return [json.loads(line) for line in outputs[0][0].splitlines() if line.startswith("{")]


def run_in(root: Path, **weights: object) -> Store:
    root.mkdir(parents=True, exist_ok=True)
    config = run_config(root, **weights)
    models.directory(root / "model", models.moe())
    return store.init(config.weights.store, "run")


def checksums(opened: Store, version: int) -> dict[str, str]:
    manifest = opened.manifest("bf16", version)
    assert manifest is not None
    return {name: entry.xxh3 for name, entry in manifest.tensors.items()}


@pytest.fixture(params=["installed", "MILES_SOURCE"])
def source(request: pytest.FixtureRequest) -> str | None:
    if request.param == "installed":
        if find_spec("miles") is None:
            pytest.skip("Miles is not installed")
        return None
    if "MILES_SOURCE" not in os.environ:
        pytest.skip("MILES_SOURCE names no Miles checkout")
    return os.environ["MILES_SOURCE"]


@pytest.mark.miles
def test_sharded_ranks_publish_what_one_would_and_a_resume_proves_the_bytes(
    tmp_path: Path, source: str | None
) -> None:
    one, two = run_in(tmp_path / "one"), run_in(tmp_path / "two")
    other = run_in(tmp_path / "other")
    other.publish("bf16", 4, models.moe(3).items(), models.CONFIG)
    printed = train(
        [
            (tmp_path / "one", 1, [0, 1, 2]),
            (tmp_path / "two", 2, [0, 1]),
            (tmp_path / "one", 1, [1, 2]),  # resumes from the checkpoint of version 1
            (tmp_path / "other", 1, [4]),  # resumes from a checkpoint that is not version 4's
        ],
        tmp_path / "rendezvous",
        source,
    )
    for version in (0, 1):
        assert checksums(one, version) == checksums(two, version)
    names = checksums(one, 1).keys()
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in names and "model.layers.0.self_attn.k_proj.weight" in names
    assert dict(one.read("bf16", 1))["model.embed_tokens.weight"].shape == (120, 64)  # the padding is gone
    assert all(metrics["perf/publish_wire_bytes"] > 0 for metrics in printed[:-1])

    resumed = store.open_store(one.root, "run")
    pointer = resumed.latest("bf16")
    assert (pointer.version, pointer.attempt) == (2, 2)
    assert resumed.manifest("bf16", 1).attempt == 1  # the bytes were the same, so the version stayed as it was
    assert resumed.manifest("bf16", 2).attempt == 2
    assert "version 4 was published with other bytes" in str(printed[-1]["error"])
    assert checksums(other, 4)["model.norm.weight"] == files.tensor_checksum(models.moe(3)["model.norm.weight"])


def arguments(root: Path, **changes: object) -> Namespace:
    tree = yaml.safe_load((root / "run.yaml").read_text())["mixprec"]
    return Namespace(
        **{"mixprec": tree, "start_rollout_id": 0, "update_weights_interval": 1, "hf_checkpoint": str(root / "model")}
        | changes
    )


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"is_lora": True}, "LoRA"),
        ({"update_weights_interval": 2}, {}, "--update-weights-interval 2"),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "--hf-checkpoint is quantised"),
    ],
)
def test_what_cannot_be_published_is_refused_at_start(
    tmp_path: Path, changes: dict[str, object], options: dict[str, object], message: str
) -> None:
    run_in(tmp_path)
    with pytest.raises(CapabilityError, match=message):
        publisher.Publisher(
            arguments(tmp_path, **changes),
            [],
            dict,
            model_name="qwen3moe",
            **({"quantization_config": None} | options),
        )


def write_delta(directory: Path, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], encoding: str) -> Path:
    """A version directory as Miles 0.1's disk-delta writer lays it out."""
    directory.mkdir(parents=True)
    delta, digests = {}, {}
    for name in new:
        before, after = (t[name].reshape(-1).view(torch.uint8).numpy() for t in (old, new))
        mask = before != after
        if not mask.any():
            continue
        positions = np.flatnonzero(mask).astype("<u4")
        overwrite = [np.array([positions.size], "<u4").view(np.uint8), positions.view(np.uint8), after[mask]]
        data = before ^ after if encoding == "xor" else np.concatenate(overwrite)
        delta[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(data), dtype=np.uint8)
        digests[name] = files.checksum(after)
    safetensors.numpy.save_file(delta, directory / "model-00000-of-00001.safetensors", metadata=digests)
    metadata = {"delta_encoding": encoding, "compression_format": "zstd", "checksum_format": "xxh3-128"}
    weight_map = dict.fromkeys(delta, "model-00000-of-00001.safetensors")
    (directory / store.INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return directory


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_the_post_write_hook_publishes_what_disk_delta_wrote(encoding: str, tmp_path: Path) -> None:
    opened = run_in(tmp_path)
    args, tensors = arguments(tmp_path), models.moe()
    disk_delta.post_write(args, str(tmp_path / "miles"), [])
    for version in (1, 2):
        new = models.trained(tensors, version)
        new["lm_head.weight"] = tensors["lm_head.weight"]
        written = write_delta(tmp_path / "miles" / f"weight_v{version:06d}", tensors, new, encoding)
        disk_delta.post_write(args, str(written), [])
        tensors = new
        assert opened.latest("bf16").version == version
        assert all(torch.equal(tensor, new[name]) for name, tensor in opened.read("bf16", version))


def test_the_post_write_hook_refuses_a_gap_and_a_wrong_checksum(tmp_path: Path) -> None:
    run_in(tmp_path)
    args, old, new = arguments(tmp_path), models.moe(), models.trained(models.moe(), 1)
    with pytest.raises(StoreError, match="no baseline"):
        disk_delta.post_write(args, str(write_delta(tmp_path / "a" / "weight_v000001", old, new, "xor")), [])
    disk_delta.post_write(args, str(tmp_path / "miles"), [])
    with pytest.raises(StoreError, match="the store is at 0"):
        disk_delta.post_write(args, str(write_delta(tmp_path / "b" / "weight_v000002", old, new, "xor")), [])
    with pytest.raises(StoreError, match="resumed at version 3"):
        disk_delta.post_write(arguments(tmp_path, start_rollout_id=3), str(tmp_path / "miles"), [])
    other = models.trained(models.moe(), 9)
    with pytest.raises(StoreError, match="does not have the checksum"):
        disk_delta.post_write(args, str(write_delta(tmp_path / "c" / "weight_v000001", other, new, "xor")), [])


DISK_DELTA = """
import sys
import numpy as np, safetensors.numpy, torch
from pathlib import Path
from miles.utils.disk_delta import checksum, make_tensor_reader, overwrite_encode
from test_publisher import write_delta
import weight_models as models
root = Path(sys.argv[1])
old, new = models.moe(), models.trained(models.moe(), 1)
written = write_delta(root / "weight_v000001", old, new, "overwrite")
file = safetensors.safe_open(written / "model-00000-of-00001.safetensors", framework="np")
read = make_tensor_reader(str(written))
import zstandard
for name in file.keys():
    after, before = (t[name].reshape(-1).view(torch.uint8).numpy() for t in (new, old))
    wire = zstandard.ZstdDecompressor().decompress(read(name).tobytes())
    assert wire == overwrite_encode(after, after != before).tobytes(), name
    assert file.metadata()[name] == checksum("xxh3-128", after), name
print("same")
"""


def test_the_layout_that_the_hook_is_tested_with_is_miles_own(tmp_path: Path) -> None:
    if "MILES_SOURCE" not in os.environ:
        pytest.skip("MILES_SOURCE names no Miles checkout")
    path = [os.environ["MILES_SOURCE"], str(HERE), str(HERE.parents[1])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SHIMS), *path])}
    run = subprocess.run([sys.executable, "-c", DISK_DELTA, str(tmp_path)], env=env, capture_output=True, text=True)
    assert run.stdout.strip().endswith("same"), run.stderr[-2000:]
