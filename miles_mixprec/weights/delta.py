"""Deltas between versions of a view, and the local replicas that follow them.

A delta holds, for every tensor whose bytes changed, zstd(new XOR old) as a uint8 vector under the tensor's name;
its manifest states the checksum of the *new* bytes. Tensors are streamed in buckets, so memory is bounded by one
bucket and one compressed tensor, whatever the model's size.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import msgspec
import numpy as np
import torch
import zstandard
from torch import Tensor

from miles_mixprec.errors import StoreError
from miles_mixprec.weights.files import checksum, write_local
from miles_mixprec.weights.store import INDEX, Entry, Manifest, Pointer, Store, Tensors, Writer

BUCKET_BYTES = 32 << 20
_LEVEL = 1  # XORed weights are mostly zeros; higher levels cost more time than bytes
_REPLICA = "replica.json"


def add_delta(writer: Writer, name: str, new: Tensor, base: Path, manifest: Manifest) -> None:
    """Append what changed in tensor `name` since `manifest`, whose full files lie in `base`; count it in the stats.

    Raises StoreError if the tensor is not in the base or has another size there.
    """
    entry = manifest.tensors.get(name)
    data = new.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if entry is None or entry.bytes != data.nbytes:
        raise StoreError(
            f"tensor {name} differs in size from version {manifest.version}; publish this version in full"
        )
    compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=data.nbytes)
    parts, changed = [], 0
    old = _mapped(base / entry.file).bytes_of(name)
    for start in range(0, data.nbytes, BUCKET_BYTES):
        difference = data[start : start + BUCKET_BYTES] ^ old[start : start + BUCKET_BYTES]
        changed += int(np.count_nonzero(difference))
        parts.append(compressor.compress(difference.tobytes()))
    parts.append(compressor.flush())
    stats = writer.stats
    wire = b"".join(parts) if changed else b""
    for key, value in (("changed_bytes", changed), ("total_bytes", data.nbytes), ("wire_bytes", len(wire))):
        stats[key] = stats.get(key, 0) + value
    writer.add(
        name,
        torch.frombuffer(bytearray(wire), dtype=torch.uint8) if wire else torch.empty(0, dtype=torch.uint8),
        final=checksum(data),
    )


def apply_delta(base: Path, base_manifest: Manifest, delta: Path, manifest: Manifest, into: Path) -> Manifest:
    """Write the full version that `manifest` describes into `into`, from the full `base` and the files in `delta`.

    Files in which nothing changed are hard links to the base. Returns the manifest of the result's own files. Raises
    StoreError, naming the tensor, if a result's checksum is not the published one.
    """
    into.mkdir(parents=True, exist_ok=True)
    by_file: dict[str, list[str]] = {name: [] for name in base_manifest.files}
    for name, entry in base_manifest.tensors.items():
        if name not in manifest.tensors:
            raise StoreError(
                f"{manifest.view} version {manifest.version} lacks tensor {name} of version {base_manifest.version}"
            )
        if manifest.tensors[name].bytes:
            by_file[entry.file].append(name)
        elif manifest.tensors[name].xxh3 != entry.xxh3:
            raise StoreError(
                f"{manifest.view} version {manifest.version}: tensor {name} does not apply to version "
                f"{base_manifest.version}"
            )
    for file_name, names in by_file.items():
        target = into / file_name
        target.unlink(missing_ok=True)
        if not names and _linked(base / file_name, target):
            continue
        shutil.copyfile(base / file_name, target)
        file = _TensorFile(target, writable=True)
        for name in names:
            where = f"{manifest.view} version {manifest.version}: the delta of {name}"
            _xor(file.bytes_of(name), _wire(delta / manifest.tensors[name].file, name, where), where)
            if checksum(file.bytes_of(name)) != manifest.tensors[name].xxh3:
                raise StoreError(f"{where} does not give what was published")
    shutil.copyfile(base / INDEX, into / INDEX)
    shutil.copyfile(delta / "config.json", into / "config.json")
    tensors = {n: Entry(e.file, e.bytes, manifest.tensors[n].xxh3) for n, e in base_manifest.tensors.items()}
    documents = manifest.documents | {INDEX: base_manifest.documents[INDEX]}
    return msgspec.structs.replace(
        manifest, tensors=tensors, files=base_manifest.files, documents=documents, base=None
    )


@dataclass(frozen=True)
class Replica:
    """A verified full version of a view in a local directory."""

    directory: Path
    manifest: Manifest

    def read(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """`names` or all tensors, mapped and verified. Raises StoreError, naming the tensor."""
        for name in names or sorted(self.manifest.tensors):
            yield name, self._tensors[name]

    @cached_property
    def _tensors(self) -> Tensors:
        return Tensors(self.directory, self.manifest)


def add_tensor(writer: Writer, name: str, tensor: Tensor, base: Replica | None) -> None:
    """Append a tensor in full, or what changed in it since `base`."""
    if base is None:
        writer.add(name, tensor)
    else:
        add_delta(writer, name, tensor, base.directory, base.manifest)


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
    manifest = store.pointed(view, pointer)
    lineage: list[Manifest] = []
    while manifest.base is not None and (replica := _kept(scratch, manifest)) is None:
        lineage.append(manifest)
        base = store.manifest(view, manifest.base)
        if base is None:
            raise StoreError(
                f"{view} version {manifest.version} builds on version {manifest.base}, which the store lacks"
            )
        manifest = base
    if manifest.base is None:
        replica = Replica(
            store.fetch(manifest, scratch / f"full-{manifest.version:06d}-{manifest.digest[:12]}"), manifest
        )
    assert replica is not None
    for step in reversed(lineage):
        delta = store.fetch(step, scratch / f"delta-{step.version:06d}")
        into = scratch / _replica_name(step)
        applied = apply_delta(replica.directory, replica.manifest, delta, step, into)
        write_local(into / _REPLICA, msgspec.json.encode(applied))
        replica = Replica(into, applied)
    try:
        for _ in replica.read() if verify else ():
            pass
    except StoreError:
        if replica.directory.is_relative_to(scratch):  # a bad copy; the next attempt makes a new one
            shutil.rmtree(replica.directory)
        raise
    _forget_older(scratch, keep=2)
    return replica


def _replica_name(manifest: Manifest) -> str:
    return f"replica-{manifest.version:06d}-{manifest.digest[:12]}"


def _kept(scratch: Path, manifest: Manifest) -> Replica | None:
    directory = scratch / _replica_name(manifest)
    record = directory / _REPLICA
    return Replica(directory, msgspec.json.decode(record.read_bytes(), type=Manifest)) if record.exists() else None


def _forget_older(scratch: Path, keep: int) -> None:
    for kind in ("full", "delta", "replica"):
        for old in sorted(scratch.glob(f"{kind}-*"), key=os.path.getmtime)[:-keep]:
            shutil.rmtree(old)


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        return False
    return True


def _wire(path: Path, name: str, where: str) -> bytes:
    try:
        return _mapped(path).bytes_of(name).tobytes()
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(f"{where} cannot be read from {path}") from error


def _xor(target: np.ndarray, wire: bytes, where: str) -> None:
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(wire)) as reader:
            for start in range(0, target.nbytes, BUCKET_BYTES):
                bucket = target[start : start + BUCKET_BYTES]
                difference = np.frombuffer(reader.read(bucket.nbytes), dtype=np.uint8)
                if difference.nbytes != bucket.nbytes:
                    raise StoreError(f"{where} ends early")
                bucket ^= difference
    except zstandard.ZstdError as error:
        raise StoreError(f"{where} cannot be decompressed ({error})") from error


class _TensorFile:
    """The tensors of one safetensors file as byte vectors over a memory map."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        with open(path, "r+b" if writable else "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        size = int.from_bytes(self._map[:8], "little")
        self._start = 8 + size
        self._header = json.loads(self._map[8 : self._start])

    def bytes_of(self, name: str) -> np.ndarray:
        begin, end = self._header[name]["data_offsets"]
        return np.frombuffer(self._map, dtype=np.uint8, count=end - begin, offset=self._start + begin)


def _mapped(path: Path) -> _TensorFile:
    status = path.stat()
    return _mapped_once(path, status.st_ino, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _mapped_once(path: Path, inode: int, changed: int) -> _TensorFile:
    return _TensorFile(path)
