"""One version of a view: its pointer, its manifest and their parts, and its tensors in a local directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import safetensors
from torch import Tensor

from miles_mixprec.errors import StoreError
from miles_mixprec.weights.files import checksum, tensor_checksum

MANIFEST, INDEX = "manifest.json", "model.safetensors.index.json"


class Pointer(msgspec.Struct, frozen=True):
    """The newest version of a view. Orders by attempt, then by version: a new attempt may go back."""

    version: int
    run: str
    attempt: int
    manifest: str  # digest of the version's manifest

    @property
    def order(self) -> tuple[int, int]:
        return self.attempt, self.version


class Entry(msgspec.Struct, frozen=True):
    file: str
    bytes: int
    xxh3: str  # of the final bytes, hex


class Part(msgspec.Struct, frozen=True):
    """What one writer (a pipeline rank, an encoder shard) contributed to a version."""

    run: str
    attempt: int
    source: str  # digest of the BF16 manifest that was encoded; "" for the BF16 version itself
    base: int | None  # delta: the version that the files apply to
    tensors: dict[str, Entry]
    stats: dict[str, float] = {}


class Manifest(msgspec.Struct, frozen=True):
    view: str
    version: int
    run: str
    attempt: int
    source: str
    tensors: dict[str, Entry]
    files: dict[str, int]  # size in bytes
    documents: dict[str, str]  # xxh3 of config.json and the index
    base: int | None = None  # delta: the version that the files apply to
    stats: dict[str, float] = {}
    digest: str = ""  # xxh3 of this manifest with an empty digest

    def __str__(self) -> str:
        return f"{self.view} version {self.version}"


class Replica:
    """A version in a local directory, its tensors mapped from the files and checked as they are read.

    Raises StoreError, naming the document or tensor, where the bytes are not those of the manifest.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self._files: dict[str, Any] = {}
        for name, digest in manifest.documents.items():
            path = directory / name
            if not path.exists() or checksum(path.read_bytes()) != digest:
                raise StoreError(f"{manifest}: {path} is not the published one")

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.stored(name)
        entry = self.manifest.tensors[name]
        if tensor_checksum(tensor) != entry.xxh3:
            raise StoreError(
                f"{self.manifest}, tensor {name}: bytes differ from the manifest in {self.directory / entry.file}"
            )
        return tensor

    def stored(self, name: str) -> Tensor:
        """What the file holds under `name`, unchecked: in a delta, how the tensor changed."""
        entry = self.manifest.tensors[name]
        path = self.directory / entry.file
        try:
            if entry.file not in self._files:
                self._files[entry.file] = safetensors.safe_open(path, framework="pt")
            return self._files[entry.file].get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise StoreError(f"{self.manifest}, tensor {name}: cannot read {path} ({error})") from error

    def read(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """`names` or all tensors, in alphabetical order."""
        for name in sorted(self.manifest.tensors if names is None else names):
            yield name, self[name]

    def verify(self) -> None:
        """Read every byte."""
        for _ in self.read():
            pass
