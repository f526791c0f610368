"""The weight store: immutable versions of every view, and one pointer per view to the newest.

    <store>/run.json                                   {"run", "attempt"}: who may write
    <store>/updates/<view>/weight_v000012/             visible once its manifest.json is whole
    <store>/latest/<view>                              {"version", "run", "attempt", "manifest"}, written last

A chain of digests makes mislabelling detectable everywhere: the pointer names the digest of the manifest, the
manifest the xxh3-128 of every tensor's final bytes. Files carry the attempt in their name and every write is fenced
by `run.json`, so that a process left over from an earlier attempt can neither change nor complete a version of this
one. The store is a local directory or any fsspec URL whose `pipe` is atomic (S3, GCS, a Modal Volume's mount).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import numpy as np
import safetensors.torch
import torch
import zstandard
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from miles_mixprec.errors import StoreError
from miles_mixprec.weights import files
from miles_mixprec.weights.files import as_bytes, checksum, tensor_checksum
from miles_mixprec.weights.version import INDEX, MANIFEST, Entry, Manifest, Part, Pointer, Replica

FILE_BYTES = 2 << 30  # of one safetensors file, and the most that a writer holds in memory
_VERSION = re.compile(r"weight_v(\d{6,})$")
_DELTA_LEVEL = 1  # of zstd: XORed weights are mostly zeros; higher levels cost more time than bytes


@dataclass(frozen=True)
class Store:
    """A store opened for reading, or for writing as `attempt` of `run`. Build with `init` or `open_store`."""

    root: str
    run: str
    attempt: int

    @property
    def fs(self) -> Any:
        return fsspec.core.url_to_fs(self.root)[0]

    @property
    def path(self) -> str:
        return str(fsspec.core.url_to_fs(self.root)[1]).rstrip("/")

    @property
    def local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    # --- reading -------------------------------------------------------------------------------------------------

    def latest(self, view: str) -> Pointer | None:
        """The view's pointer, or None before its first version. Raises StoreError if it is unreadable or foreign."""
        raw = self.read_file(self._latest(view))
        if raw is None:
            return None
        try:
            pointer = msgspec.json.decode(raw, type=Pointer)
        except msgspec.DecodeError as error:
            raise StoreError(
                f"store {self.root}: latest/{view} is damaged ({error}); rewind the run to restore it"
            ) from error
        if pointer.run != self.run:
            raise StoreError(
                f"store {self.root}: latest/{view} belongs to run {pointer.run}, not {self.run}; use another store"
            )
        return pointer

    def manifest(self, view: str, version: int) -> Manifest | None:
        """The manifest of a complete version of this run, or None: what has no valid manifest does not exist."""
        raw = self.read_file(f"{self.directory(view, version)}/{MANIFEST}")
        if raw is None:
            return None
        try:
            manifest = msgspec.json.decode(raw, type=Manifest)
        except msgspec.DecodeError:
            return None
        sealed = (manifest.view, manifest.version, manifest.run) == (view, version, self.run)
        return manifest if sealed and manifest.digest == _digest(manifest) else None

    def pointed(self, view: str, pointer: Pointer) -> Manifest:
        """The manifest that `pointer` names. Raises StoreError if the store holds another or none."""
        manifest = self.manifest(view, pointer.version)
        if manifest is None or manifest.digest != pointer.manifest:
            raise StoreError(
                f"store {self.root}: {view} version {pointer.version} is missing or not the published one"
            )
        return manifest

    def versions(self, view: str) -> list[int]:
        """Versions that have a directory, complete or not, ascending."""
        parent = f"{self.path}/updates/{view}"
        if not self.fs.exists(parent):
            return []
        self.fs.invalidate_cache(parent)
        matches = (_VERSION.match(_base_name(path)) for path in self.fs.ls(parent, detail=False))
        return sorted(int(match.group(1)) for match in matches if match)

    def directory(self, view: str, version: int) -> str:
        return f"{self.path}/updates/{view}/weight_v{version:06d}"

    def _latest(self, view: str) -> str:
        return f"{self.path}/latest/{view}"

    def fetch(self, manifest: Manifest, into: Path) -> Path:
        """A local directory with the version's files: the store's own if it is local, else a copy under `into`."""
        source = self.directory(manifest.view, manifest.version)
        if self.local:
            return Path(source)
        into.mkdir(parents=True, exist_ok=True)
        for name in [*manifest.files, *manifest.documents]:
            target = into / name
            if not (target.exists() and target.stat().st_size == manifest.files.get(name)):
                self.fs.get_file(f"{source}/{name}", str(target))
        return into

    def read(self, view: str, version: int) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a full version, mapped and verified. Raises StoreError, naming the tensor."""
        manifest = self.manifest(view, version)
        if manifest is None:
            raise StoreError(f"store {self.root}: {view} has no complete version {version}")
        with tempfile.TemporaryDirectory() as scratch:
            yield from Replica(self.fetch(manifest, Path(scratch)), manifest).read()

    # --- writing -------------------------------------------------------------------------------------------------

    def writer(
        self, view: str, version: int, *, part: int = 0, source: str = "", base: Replica | None = None
    ) -> Writer:
        """A writer of one part of a version, as a delta of `base` if that is given.

        Raises StoreError if this attempt no longer owns the store.
        """
        self.check_fence()
        if self.local:
            os.makedirs(self.directory(view, version), exist_ok=True)
        return Writer(self, view, version, part, source, base)

    def publish(
        self, view: str, version: int, tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]
    ) -> Manifest:
        """Write a version in one part, make it visible and point `latest` to it.

        Raises StoreError if it would go backwards, the disk is too full, or the store belongs to another attempt.
        """
        writer = self.writer(view, version)
        for name, tensor in tensors:
            writer.add(name, tensor)
        writer.close()
        return self.seal(view, version, parts=1, config=config)

    def parts(self, view: str, version: int, parts: int, source: str) -> list[Part] | None:
        """The parts of a version as this attempt wrote them, or None while one is missing."""
        found = []
        for i in range(parts):
            raw = self.read_file(f"{self.directory(view, version)}/{_part_name(self.attempt, i)}")
            if raw is None:
                return None
            part = msgspec.json.decode(raw, type=Part)
            if (part.run, part.attempt, part.source) != (self.run, self.attempt, source):
                return None
            found.append(part)
        return found

    def seal(self, view: str, version: int, *, parts: int, config: Mapping[str, Any], source: str = "") -> Manifest:
        """Join the parts into a version, write its manifest and advance the pointer. Idempotent."""
        written = self.parts(view, version, parts, source)
        if written is None:
            raise StoreError(
                f"store {self.root}: {view} version {version} lacks some of its {parts} parts; write them again"
            )
        if len({part.base for part in written}) != 1:
            raise StoreError(f"{view} version {version}: its writers used different bases; write it again")
        tensors: dict[str, Entry] = {}
        for part in written:
            for name, entry in part.tensors.items():
                if tensors.setdefault(name, entry).xxh3 != entry.xxh3:
                    raise StoreError(f"{view} version {version}: two writers disagree about tensor {name}")
        directory = self.directory(view, version)
        sizes = {name: int(self.fs.size(f"{directory}/{name}")) for name in sorted({e.file for e in tensors.values()})}
        index = {
            "metadata": {"total_size": sum(entry.bytes for entry in tensors.values())},
            "weight_map": {name: entry.file for name, entry in tensors.items()},
        }
        documents = {
            "config.json": json.dumps(config, indent=2, sort_keys=True).encode(),
            INDEX: json.dumps(index).encode(),
        }
        manifest = Manifest(
            view,
            version,
            self.run,
            self.attempt,
            source,
            tensors,
            files=sizes,
            documents={name: checksum(data) for name, data in documents.items()},
            base=written[0].base,
            stats={key: sum(part.stats[key] for part in written) for key in written[0].stats},
        )
        manifest = msgspec.structs.replace(manifest, digest=_digest(manifest))
        for name, data in documents.items():
            self.write(f"{directory}/{name}", data)
        self.write(f"{directory}/{MANIFEST}", msgspec.json.encode(manifest))
        self.point(view, Pointer(version, self.run, self.attempt, manifest.digest))
        return manifest

    def discard_parts(self, view: str, version: int) -> None:
        """Remove what this attempt wrote into a version that an earlier one had completed."""
        directory = self.directory(view, version)
        for path in self.fs.ls(directory, detail=False):
            if f"-a{self.attempt}-p" in _base_name(path):
                self.fs.rm(path)

    def point(self, view: str, pointer: Pointer) -> None:
        """Advance the view's pointer. Raises StoreError if that would go backwards within the attempt."""
        current = self.latest(view)
        if current is not None and current.order > pointer.order:
            raise StoreError(
                f"store {self.root}: {view} is at version {current.version} (attempt {current.attempt}) and cannot go "
                f"back to {pointer.version}; resume the run under a new attempt"
            )
        self.write(self._latest(view), msgspec.json.encode(pointer))

    def rewind(self, version: int) -> Store:
        """Start the next attempt at `version`: fence this one out, drop what is newer, point views at or below it.

        Returns the store opened as the new attempt. A view without a complete version at or below `version` has no
        pointer until one is published; its engines wait. Raises StoreError, naming the tensor, if the bytes of a local
        version that becomes the newest are damaged.
        """
        store = _own(self.root, self.run, self.attempt + 1)
        for view in sorted(store.views(), key=lambda view: view == "bf16"):  # bf16 last: encoders follow it
            kept = [v for v in store.versions(view) if v <= version]
            newest = next((m for v in reversed(kept) if (m := store.manifest(view, v)) is not None), None)
            if newest is not None:
                if store.local and newest.base is None:
                    Replica(Path(store.directory(view, newest.version)), newest).verify()
                pointer = Pointer(newest.version, self.run, store.attempt, newest.digest)
                store.write(self._latest(view), msgspec.json.encode(pointer))
            else:
                files.remove(self.fs, self._latest(view))
            for dropped in (v for v in store.versions(view) if v > version):
                store.drop(view, dropped)
        return store

    def views(self) -> list[str]:
        """Views that have versions or a pointer."""
        folders = [folder for name in ("updates", "latest") if self.fs.exists(folder := f"{self.path}/{name}")]
        found = {_base_name(path) for folder in folders for path in self.fs.ls(folder, detail=False)}
        return sorted(name for name in found if "." not in name)

    def prune(self, view: str, keep: int) -> list[int]:
        """Drop all but the newest `keep` complete versions and the bases of their deltas. Returns what was dropped."""
        pointer = self.latest(view)
        if pointer is None:
            return []
        complete = [
            m for v in self.versions(view) if v <= pointer.version and (m := self.manifest(view, v)) is not None
        ]
        if not complete:
            return []
        needed = complete[-keep:][0].version
        while (oldest := self.manifest(view, needed)) is not None and oldest.base is not None:
            needed = oldest.base
        dropped = [v for v in self.versions(view) if v < needed]
        for version in dropped:
            self.drop(view, version)
        return dropped

    def drop(self, view: str, version: int) -> None:
        """Remove a version, its manifest first, so that it is never seen in part."""
        directory = self.directory(view, version)
        files.remove(self.fs, f"{directory}/{MANIFEST}")
        if self.fs.exists(directory):
            self.fs.rm(directory, recursive=True)

    def check_fence(self) -> None:
        """Raise StoreError if another attempt or run has taken the store over."""
        owner = open_store(self.root)
        if owner is not None and owner != self:
            raise StoreError(
                f"store {self.root} now belongs to run {owner.run} attempt {owner.attempt}; this is run {self.run} "
                f"attempt {self.attempt} and must stop writing"
            )

    def read_file(self, path: str) -> bytes | None:
        """The bytes of a file, None if it does not exist."""
        return files.read(self.fs, path)

    def write(self, path: str, data: bytes) -> None:
        """Replace a small file whole, if this attempt still owns the store."""
        self.check_fence()
        files.write(self.fs, path, data)


class Writer:
    """Streams tensors of one part into safetensors files of bounded size."""

    def __init__(self, store: Store, view: str, version: int, part: int, source: str, base: Replica | None) -> None:
        self._store, self._part, self._source, self._base = store, part, source, base
        self._directory = store.directory(view, version)
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._file = 0
        self._tensors: dict[str, Entry] = {}
        counted = () if base is None else ("changed_bytes", "total_bytes", "wire_bytes")
        self._stats: dict[str, float] = dict.fromkeys(counted, 0)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor, or what changed in it since the base.

        Raises StoreError for a tensor that was added before, or that the base lacks or holds in another size.
        """
        if name in self._tensors:
            raise StoreError(f"tensor {name} was added twice to {self._directory}")
        data = tensor.detach().cpu().contiguous()
        digest = tensor_checksum(data)
        if self._base is not None:
            data = self._difference(name, data, self._base)
        if self._pending and self._pending_bytes + data.nbytes > FILE_BYTES:
            self._flush()
        self._tensors[name] = Entry(self._file_name(), data.nbytes, digest)
        self._pending[name] = data
        self._pending_bytes += data.nbytes

    def close(self) -> None:
        """Complete the part. A writer that is not closed leaves nothing that anyone reads."""
        if self._pending:
            self._flush()
        store, base = self._store, None if self._base is None else self._base.manifest.version
        part = Part(store.run, store.attempt, self._source, base, self._tensors, self._stats)
        store.write(f"{self._directory}/{_part_name(store.attempt, self._part)}", msgspec.json.encode(part))

    def _difference(self, name: str, tensor: Tensor, base: Replica) -> Tensor:
        """zstd(new XOR old) as a uint8 vector, empty where nothing changed; counted in the stats."""
        entry = base.manifest.tensors.get(name)
        if entry is None or entry.bytes != tensor.nbytes:
            raise StoreError(
                f"tensor {name} differs in size from version {base.manifest.version}; publish this version in full"
            )
        difference = as_bytes(tensor) ^ as_bytes(base.stored(name))  # staging has checked the base
        changed = int(np.count_nonzero(difference))
        wire = zstandard.ZstdCompressor(level=_DELTA_LEVEL).compress(difference) if changed else b""
        self._stats["changed_bytes"] += changed
        self._stats["total_bytes"] += tensor.nbytes
        self._stats["wire_bytes"] += len(wire)
        return torch.from_numpy(np.frombuffer(bytearray(wire), dtype=np.uint8))

    def _file_name(self) -> str:
        return f"model-a{self._store.attempt}-p{self._part:03d}-{self._file:05d}.safetensors"

    def _flush(self) -> None:
        path = f"{self._directory}/{self._file_name()}"
        if self._store.local:
            files.check_space(self._directory, self._pending_bytes)
            temporary = f"{path}.{secrets.token_hex(4)}.tmp"
            files.write_tensors(Path(temporary), self._pending)
            files.sync(temporary)
            os.replace(temporary, path)
        else:
            self._store.fs.pipe_file(path, safetensors.torch.save(self._pending, metadata={"format": "pt"}))
        self._pending, self._pending_bytes, self._file = {}, 0, self._file + 1


def init(root: str, run: str) -> Store:
    """Open the store for writing, creating it for `run` if it is empty. Raises StoreError if it is another run's."""
    return open_store(root, run) or _own(root, run, 1)


def open_store(root: str, run: str | None = None) -> Store | None:
    """Open the store as its present attempt, or None while nobody has initialised it.

    Raises StoreError if it is damaged or not `run`'s.
    """
    fs, path = fsspec.core.url_to_fs(root)
    raw = files.read(fs, f"{str(path).rstrip('/')}/run.json")
    if raw is None:
        return None
    try:
        owner = msgspec.json.decode(raw, type=_Owner)
    except msgspec.DecodeError as error:
        raise StoreError(f"store {root}: run.json is damaged; write the run's id and attempt back into it") from error
    if run not in (None, owner.run):
        raise StoreError(f"store {root} belongs to run {owner.run}, not {run}; set weights.store to an empty place")
    return Store(root, owner.run, owner.attempt)


class _Owner(msgspec.Struct):
    run: str
    attempt: int


def _own(root: str, run: str, attempt: int) -> Store:
    store = Store(root, run, attempt)
    files.write(store.fs, f"{store.path}/run.json", msgspec.json.encode(_Owner(run, attempt)))
    return store


def _digest(manifest: Manifest) -> str:
    return checksum(msgspec.json.encode(msgspec.structs.replace(manifest, digest="")))


def _base_name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _part_name(attempt: int, part: int) -> str:
    return f"part-a{attempt}-p{part:03d}.json"
