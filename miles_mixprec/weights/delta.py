"""Deltas between versions of a view, and the local replicas that follow them.

A delta holds, for every tensor whose bytes changed, zstd(new XOR old) as a uint8 vector under the tensor's name;
its manifest states the checksum of the *new* bytes. Beyond what is written or mapped, one tensor at a time
is in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import zstandard

from miles_mixprec.errors import StoreError
from miles_mixprec.weights.files import as_bytes, checksum, write_local
from miles_mixprec.weights.store import Store
from miles_mixprec.weights.version import INDEX, Entry, Manifest, Pointer, Replica

_RECORD = "replica.json"  # in a replica that is whole: its manifest
_KINDS = ("full", "delta", "replica")  # of directories in scratch


def apply_delta(base: Replica, delta: Replica, into: Path) -> Replica:
    """The full version that `delta` makes of `base`, written into `into`.

    Files in which nothing changed are hard links to the base. Raises StoreError, naming the tensor, if a result's
    checksum is not the published one.
    """
    into.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Entry] = {}
    for name, old in base.manifest.tensors.items():
        new = delta.manifest.tensors.get(name)
        if new is None:
            raise StoreError(f"{delta.manifest} lacks tensor {name} of version {base.manifest.version}")
        if not new.bytes and new.xxh3 != old.xxh3:
            raise StoreError(f"{delta.manifest}: tensor {name} does not apply to version {base.manifest.version}")
        tensors[name] = Entry(old.file, old.bytes, new.xxh3)
    for file in base.manifest.files:
        target = into / file
        target.unlink(missing_ok=True)
        changed = [n for n, entry in tensors.items() if entry.file == file and delta.manifest.tensors[n].bytes]
        if not changed and _linked(base.directory / file, target):
            continue
        shutil.copyfile(base.directory / file, target)
        content = _writable(target)
        for name in changed:
            content[name] ^= _difference(delta, name, content[name].nbytes)
            if checksum(content[name]) != tensors[name].xxh3:
                raise StoreError(f"{delta.manifest}: the delta of {name} does not give what was published")
    shutil.copyfile(base.directory / INDEX, into / INDEX)
    shutil.copyfile(delta.directory / "config.json", into / "config.json")
    manifest = msgspec.structs.replace(
        delta.manifest,
        tensors=tensors,
        files=base.manifest.files,
        documents=delta.manifest.documents | {INDEX: base.manifest.documents[INDEX]},
        base=None,
    )
    write_local(into / _RECORD, msgspec.json.encode(manifest))
    return Replica(into, manifest)


def delta_base(store: Store, view: str, version: int, anchor_every: int, scratch: Path) -> Replica | None:
    """The version that `version` is to be a delta of, on this machine; None where it is to be written in full."""
    pointer = store.latest(view)
    if pointer is None or not anchor_every or version % anchor_every == 0 or pointer.version >= version:
        return None
    return stage(store, view, pointer, scratch)


def stage(store: Store, view: str, pointer: Pointer, scratch: Path, *, verify: bool = True) -> Replica:
    """Bring the version that `pointer` names onto this machine and, unless told otherwise, check its every byte.

    A full version in a local store is used where it lies. A delta is applied to the newest version in `scratch` that
    it descends from, else to the full version at the root of its lineage. Raises StoreError.
    """
    lineage = [store.pointed(view, pointer)]
    while (manifest := lineage[-1]).base is not None and not (_place(scratch, "replica", manifest) / _RECORD).exists():
        base = store.manifest(view, manifest.base)
        if base is None:
            raise StoreError(f"{manifest} builds on version {manifest.base}, which the store lacks")
        lineage.append(base)
    root, *steps = reversed(lineage)
    try:
        replica = _root(store, root, scratch)
        for step in steps:
            delta = Replica(store.fetch(step, _place(scratch, "delta", step)), step)
            replica = apply_delta(replica, delta, _place(scratch, "replica", step))
        if verify:
            replica.verify()
    except StoreError:
        for used in lineage:  # one of the copies is bad; the next attempt makes new ones
            for kind in _KINDS:
                shutil.rmtree(_place(scratch, kind, used), ignore_errors=True)
        raise
    for kind in _KINDS:
        for old in sorted(scratch.glob(f"{kind}-*"), key=os.path.getmtime)[:-2]:
            shutil.rmtree(old)
    return replica


def _root(store: Store, manifest: Manifest, scratch: Path) -> Replica:
    """A full version, or one that was made of a delta before."""
    if manifest.base is None:
        return Replica(store.fetch(manifest, _place(scratch, "full", manifest)), manifest)
    directory = _place(scratch, "replica", manifest)
    return Replica(directory, msgspec.json.decode((directory / _RECORD).read_bytes(), type=Manifest))


def _place(scratch: Path, kind: str, manifest: Manifest) -> Path:
    return scratch / f"{kind}-{manifest.version:06d}-{manifest.digest[:12]}"


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        return False
    return True


def _writable(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as byte vectors, mapped: what is assigned to them is in the file."""
    content = np.memmap(path, dtype=np.uint8, mode="r+")
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:start].tobytes())
    ranges = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: content[start + begin : start + end] for name, (begin, end) in ranges.items()}


def _difference(delta: Replica, name: str, size: int) -> np.ndarray:
    """What `delta` holds of a tensor of `size` bytes, uint8 `[size]`."""
    where = f"{delta.manifest}: the delta of {name}"
    try:
        wire = zstandard.ZstdDecompressor().stream_reader(as_bytes(delta.stored(name)).data)
        difference = np.frombuffer(wire.read(size), dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise StoreError(f"{where} cannot be decompressed ({error})") from error
    if difference.nbytes != size:
        raise StoreError(f"{where} ends early")
    return difference
