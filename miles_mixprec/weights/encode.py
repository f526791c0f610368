"""The encoder process: follows `latest/bf16` and publishes the same version in every other view of the fleet.

    python -m miles_mixprec.weights.encode --config run.yaml [--views fp8,nvfp4] [--shard 1/4]

Each BF16 unit is read once and encoded for all the process's views. Shard 0 chooses the version and publishes it
once every shard has written its part; versions that appear while it works are skipped in favour of the newest.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from miles_mixprec.config import Config, from_file
from miles_mixprec.errors import ConfigError, StoreError
from miles_mixprec.weights import encoders
from miles_mixprec.weights.delta import delta_base, stage
from miles_mixprec.weights.store import Store, open_store
from miles_mixprec.weights.version import Manifest, Pointer

logger = logging.getLogger(__name__)


def encode_part(
    store: Store,
    pointer: Pointer,
    views: Sequence[str],
    scratch: Path,
    *,
    shard: int = 0,
    shards: int = 1,
    anchor_every: int = 0,
) -> None:
    """Write this shard's part of the BF16 version that `pointer` names, in each of `views`.

    `anchor_every` > 0: publish deltas, and every so many versions a full one. Raises StoreError.
    """
    replica = stage(store, "bf16", pointer, scratch / "bf16", verify=False)  # reading verifies
    writers = {}
    for view in views:
        base = delta_base(store, view, pointer.version, anchor_every, scratch / view)
        writers[view] = store.writer(view, pointer.version, part=shard, source=pointer.manifest, base=base)
    for unit in encoders.units(replica.manifest.tensors)[shard::shards]:
        tensors = dict(replica.read(unit))
        for view, writer in writers.items():
            for name, tensor in encoders.encode(view, tensors).items():
                writer.add(name, tensor)
    for writer in writers.values():
        writer.close()


def seal_version(store: Store, pointer: Pointer, view: str, scratch: Path, *, shards: int = 1) -> Manifest | None:
    """Publish the view's version once every shard's part is there; None while one is missing."""
    parts = store.parts(view, pointer.version, shards, pointer.manifest)
    if parts is None:
        return None
    replica = stage(store, "bf16", pointer, scratch / "bf16", verify=False)
    config = json.loads((replica.directory / "config.json").read_text())
    names = [name for part in parts for name in part.tensors]
    config = encoders.view_config(view, config, names)
    return store.seal(view, pointer.version, parts=shards, config=config, source=pointer.manifest)


def encode_version(
    store: Store, pointer: Pointer, views: Sequence[str], scratch: Path, *, anchor_every: int = 0
) -> None:
    """Encode and publish one BF16 version in each of `views` in this process. Raises StoreError."""
    encode_part(store, pointer, views, scratch, anchor_every=anchor_every)
    for view in views:
        seal_version(store, pointer, view, scratch)


def behind(store: Store, pointer: Pointer, views: Sequence[str]) -> list[str]:
    """Views that do not yet hold the BF16 version of `pointer`."""
    return [view for view in views if (at := store.latest(view)) is None or at.order < pointer.order]


def follow(config: Config, views: Sequence[str], *, shard: int = 0, shards: int = 1) -> None:
    """Encode newest BF16 versions until the process ends. Raises StoreError for a version that cannot be encoded."""
    scratch = Path(config.run_dir) / "encode" / f"shard{shard}"
    while True:
        store = open_store(config.weights.store, config.run_id)
        pointer = None
        try:
            if store is None or (pointer := _target(store, views, shard)) is None:
                time.sleep(config.weights.poll_s)
                continue
            start = time.monotonic()
            todo = behind(store, pointer, views)
            every = config.weights.whole_every
            encode_part(store, pointer, todo, scratch, shard=shard, shards=shards, anchor_every=every)
            if shard == 0:
                _seal_all(store, pointer, todo, scratch, shards, config.weights.poll_s)
                for view in todo:
                    store.prune(view, config.weights.keep_versions)
                logger.info("version %d in %s: %.2f s", pointer.version, ", ".join(todo), time.monotonic() - start)
            else:
                while behind(store, pointer, todo) and _target(store, views, shard) == pointer:
                    time.sleep(config.weights.poll_s)
        except StoreError as error:
            now = open_store(config.weights.store, config.run_id)
            if now is None or (now == store and (pointer is None or now.latest("bf16") == pointer)):
                raise
            logger.warning("overtaken by a newer version or a resume: %s", error)


def _target(store: Store, views: Sequence[str], shard: int) -> Pointer | None:
    """The BF16 version to encode: shard 0 takes the newest and writes it down, the others do as it does."""
    note = f"{store.path}/updates/encoding-{'-'.join(sorted(views))}.json"
    if shard == 0:
        pointer = store.latest("bf16")
    else:
        noted = store.read_file(note)
        pointer = None if noted is None else msgspec.json.decode(noted, type=Pointer)
    if pointer is None or pointer.attempt != store.attempt or not behind(store, pointer, views):
        return None
    if shard == 0:
        store.write(note, msgspec.json.encode(pointer))
    return pointer


def _seal_all(store: Store, pointer: Pointer, views: Sequence[str], scratch: Path, shards: int, poll_s: float) -> None:
    for view in views:
        # a resume may point the view to the same version meanwhile; the other shards then write nothing
        while behind(store, pointer, [view]) and seal_version(store, pointer, view, scratch, shards=shards) is None:
            store.check_fence()
            time.sleep(poll_s)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m miles_mixprec.weights.encode", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="resolved configuration of the run (YAML)")
    parser.add_argument("--views", help="comma-separated; default: every view of the fleet but bf16")
    parser.add_argument("--shard", default="0/1", help="i/n: encode every n-th unit, starting with the i-th")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s encode %(message)s")
    torch.set_num_threads(1)
    config = from_file(options.config)
    views = options.views.split(",") if options.views else [view for view in config.fleet.views if view != "bf16"]
    if unknown := set(views) - set(encoders.FORMATS):
        raise ConfigError(
            f"--views {','.join(sorted(unknown))}: not encoded views; use some of {', '.join(encoders.FORMATS)}"
        )
    shard, shards = (int(number) for number in options.shard.split("/"))
    if views:
        follow(config, views, shard=shard, shards=shards)


if __name__ == "__main__":
    main()
