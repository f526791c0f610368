"""Miles 0.1's disk-delta writer as the source of BF16 versions, through its post-write hook.

For runs that keep `--update-weight-transfer-mode disk-delta`; others use `publisher`, which needs no second copy.
Layout: `weight_vNNNNNN/` with an index, and one uint8 tensor per changed tensor: zstd over XOR with the previous
bytes, or over (count, positions, new bytes); checksums of the new bytes in each safetensors file's metadata.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import zstandard
from torch import Tensor

from miles_mixprec import miles
from miles_mixprec.config import from_args
from miles_mixprec.errors import StoreError
from miles_mixprec.weights.checkpoint import Checkpoint
from miles_mixprec.weights.delta import stage
from miles_mixprec.weights.files import as_bytes, checksum
from miles_mixprec.weights.publisher import hf_config, publish_tensors, resume
from miles_mixprec.weights.store import Store, init
from miles_mixprec.weights.version import INDEX, Pointer


def post_write(args: Namespace, version_dir: str, rollout_engines: Sequence[Any]) -> None:
    """Miles 0.1's `--custom-update-weight-post-write-path`: publish what its disk-delta writer wrote.

    The baseline (the call with the root directory) becomes version 0, read from `--hf-checkpoint`; each delta the
    next one. Acts on rank 0. Raises StoreError.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    config = from_args(args)
    name = Path(version_dir).name
    if not name.startswith("weight_v"):
        if first := miles.start_version(args):
            raise StoreError(
                f"disk-delta starts from --hf-checkpoint, but the trainer resumed at version {first}; resumed runs "
                "need weights.publisher instead of the post-write hook"
            )
        checkpoint = Checkpoint(Path(args.hf_checkpoint))
        publish_tensors(config, resume(config, 0), 0, checkpoint.items(), checkpoint.config)
        return
    store = init(config.weights.store, config.run_id)
    pointer = store.latest("bf16")
    if pointer is None:
        raise StoreError(f"{version_dir} is a delta, but no baseline was published; register the hook from the start")
    version = int(name.removeprefix("weight_v"))
    if pointer.version != version - 1:
        raise StoreError(
            f"{version_dir} makes version {version}, but the store is at {pointer.version}; restart the run"
        )
    tensors = _patched(store, pointer, Path(version_dir), Path(config.run_dir) / "publish" / "base")
    publish_tensors(config, store, version, tensors, hf_config(args.hf_checkpoint))


def _patched(store: Store, pointer: Pointer, delta: Path, scratch: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the version that Miles' delta makes of `pointer`'s, checked against its checksums."""
    metadata = json.loads((delta / INDEX).read_text())["metadata"]
    changes = Checkpoint(delta) if any(delta.glob("*.safetensors")) else None
    base = stage(store, "bf16", pointer, scratch, verify=False)
    if unknown := set(changes or ()) - base.manifest.tensors.keys():
        raise StoreError(f"{delta}: tensor {min(unknown)} is not in version {pointer.version}")
    for name, tensor in base.read():
        if changes is None or name not in changes:
            yield name, tensor
            continue
        wire = zstandard.ZstdDecompressor().decompress(as_bytes(changes[name]).data)
        new = _apply_miles_delta(metadata["delta_encoding"], as_bytes(tensor), np.frombuffer(wire, dtype=np.uint8))
        if metadata["checksum_format"] == "xxh3-128" and checksum(new) != changes.metadata(name)[name]:
            raise StoreError(f"{delta}: tensor {name} does not have the checksum that Miles wrote")
        yield name, torch.from_numpy(new).view(tensor.dtype).view(tensor.shape)


def _apply_miles_delta(encoding: str, old: np.ndarray, wire: np.ndarray) -> np.ndarray:
    if encoding == "xor":
        return wire ^ old
    if encoding != "overwrite":
        raise StoreError(
            f"delta encoding {encoding!r} is unknown; use --update-weight-delta-encoding xor or overwrite"
        )
    count = int(wire[:4].view("<u4")[0])
    new = old.copy()
    new[wire[4 : 4 + 4 * count].view("<u4")] = wire[4 + 4 * count :]
    return new
