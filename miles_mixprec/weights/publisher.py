"""The trainer's side: Miles' weight updater, replaced by one that publishes BF16 versions to the store.

Bound in place of `miles.backends.megatron_utils.actor.UpdateWeightFromDistributed`, on Miles 0.0.2 and 0.1 alike. It
talks to no engine: the first `update_weights` publishes the version that the trainer starts from, each later one
the next. The train loop waits for the gather and the write of the BF16 bytes, and for nothing else.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miles_mixprec import miles
from miles_mixprec.config import Config, from_args
from miles_mixprec.errors import CapabilityError, StoreError
from miles_mixprec.weights import encoders
from miles_mixprec.weights.delta import delta_base
from miles_mixprec.weights.store import Store, Writer, init
from miles_mixprec.weights.version import Manifest, Pointer


class Publisher:
    """Miles' weight-updater interface over the store. Every trainer rank has one."""

    def __init__(
        self,
        args: Namespace,
        model: Sequence[torch.nn.Module],
        weights_getter: Callable[[], Mapping[str, Tensor]],
        *,
        model_name: str,
        quantization_config: Mapping[str, Any] | None,
        is_lora: bool = False,
    ) -> None:
        if is_lora:
            raise CapabilityError("LoRA adapters are not published as weight views; train the full weights")
        if quantization_config is not None:
            raise CapabilityError(
                "--hf-checkpoint is quantised; views are encoded from BF16, point it to the BF16 model"
            )
        if args.update_weights_interval != 1:
            raise CapabilityError(
                f"--update-weights-interval {args.update_weights_interval}: version N is that after N updates; use 1"
            )
        self._args, self._model, self._model_name = args, model, model_name
        self._config = from_args(args)
        self._store: Store | None = None
        self._metrics: dict[str, float] = {}
        self._engines_stale = True
        self.weight_version = miles.start_version(args) - 1

    def connect_rollout_engines(self, *_: object, **__: object) -> None:
        """Engines follow the store by themselves."""
        self._engines_stale = False

    def is_rollout_engines_fresh(self) -> bool:
        return not self._engines_stale

    def mark_engine_connection_stale(self) -> None:
        self._engines_stale = True

    def pop_metrics(self) -> dict[str, float]:
        metrics, self._metrics = self._metrics, {}
        return metrics

    def update_weights(self) -> None:
        """Publish the trainer's weights as the next version. Collective over all ranks. Raises StoreError."""
        started = time.monotonic()
        if self._store is None:
            self._store = self._opened()
        version = self.weight_version + 1
        writes, part, parts = miles.weight_part()
        writer = _writer(self._config, self._store, version, part) if writes else None
        sink = (lambda _: None) if writer is None else partial(_write, writer)
        miles.gather_hf(self._args, self._model, self._model_name, sink)
        if writer is not None:
            writer.close()
        miles.weight_barrier()
        if dist.get_rank() == 0:
            manifest = _seal(self._store, version, parts, hf_config(self._args.hf_checkpoint), self._config)
            self._metrics |= _metrics(manifest)
        miles.weight_barrier()
        self.weight_version = version
        miles.set_trainer_version(version)
        self._metrics["perf/publish_seconds"] = time.monotonic() - started

    def _opened(self) -> Store:
        """The store of this run, at the version the trainer starts from; what is newer is of an attempt that ended."""
        if dist.get_rank() == 0:
            resume(self._config, self.weight_version + 1)
        miles.weight_barrier()
        return init(self._config.weights.store, self._config.run_id)


def resume(config: Config, version: int) -> Store:
    """Open the run's store for a trainer that starts at `version`, as a new attempt if anything was published before.

    Every view is pointed at or below `version` and engines beyond it are made to go back. Raises StoreError.
    """
    store = init(config.weights.store, config.run_id)
    return store.rewind(version) if store.views() else store


def publish_tensors(
    config: Config, store: Store, version: int, tensors: Iterable[tuple[str, Tensor]], model: Mapping[str, Any]
) -> None:
    """Publish a BF16 version from one process. Raises StoreError."""
    writer = _writer(config, store, version, 0)
    _write(writer, tensors)
    writer.close()
    _seal(store, version, 1, model, config)
    miles.set_trainer_version(version)


def hf_config(checkpoint: str) -> dict[str, Any]:
    return json.loads((Path(checkpoint) / "config.json").read_text())


def _writer(config: Config, store: Store, version: int, part: int) -> Writer:
    scratch = Path(config.run_dir) / "publish" / f"part{part}"
    base = delta_base(store, "bf16", version, config.weights.whole_every, scratch)
    return store.writer("bf16", version, part=part, base=base)


def _write(writer: Writer, named: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in named:
        for canonical_name, canonical in encoders.encode("bf16", {name: tensor}).items():
            writer.add(canonical_name, canonical)


def _seal(store: Store, version: int, parts: int, model: Mapping[str, Any], config: Config) -> Manifest:
    """Make the version visible. One that an earlier attempt published stays, if the trainer came to the same bytes.

    Raises StoreError if it did not.
    """
    published = store.manifest("bf16", version)
    if published is None:
        manifest = store.seal("bf16", version, parts=parts, config=model)
        store.prune("bf16", config.weights.keep_versions)
        return manifest
    parts_written = store.parts("bf16", version, parts, "") or ()
    ours = {name: entry.xxh3 for part in parts_written for name, entry in part.tensors.items()}
    theirs = {name: entry.xxh3 for name, entry in published.tensors.items()}
    changed = sorted(name for name in ours.keys() | theirs if ours.get(name) != theirs.get(name))
    if changed:
        raise StoreError(
            f"version {version} was published with other bytes ({len(changed)} tensors, first {changed[0]}); the "
            "checkpoint that the trainer loaded is not the one of that version"
        )
    store.discard_parts("bf16", version)
    store.point("bf16", Pointer(version, store.run, store.attempt, published.digest))
    return published


def _metrics(manifest: Manifest) -> dict[str, float]:
    stats = manifest.stats
    total = sum(entry.bytes for entry in manifest.tensors.values())
    return {
        "perf/publish_wire_bytes": stats.get("wire_bytes", total),
        "perf/publish_density": stats["changed_bytes"] / stats["total_bytes"] if stats else 1.0,
    }
