"""Files of a store: small ones replaced whole, on a local disk or wherever fsspec reaches, and checksums."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import xxhash
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from miles_mixprec.errors import StoreError


def read(fs: Any, path: str) -> bytes | None:
    """A file's bytes, None if it does not exist."""
    try:
        return Path(path).read_bytes() if isinstance(fs, LocalFileSystem) else fs.cat_file(path)
    except FileNotFoundError:
        return None


def write(fs: Any, path: str, data: bytes) -> None:
    """Replace a small file whole. Raises StoreError if the disk refuses."""
    if isinstance(fs, LocalFileSystem):
        write_local(Path(path), data)
    else:
        fs.pipe_file(path, data)


def write_local(path: Path, data: bytes) -> None:
    """Replace a small file so that a reader, or a crash, sees the old bytes or the new ones. Raises StoreError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise cannot_write(path, error) from error
    sync(str(path.parent))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. Raises StoreError, and leaves no file, if the disk refuses."""
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt"})
    except (OSError, safetensors.SafetensorError) as error:
        path.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def remove(fs: Any, path: str) -> None:
    if fs.exists(path):
        fs.rm(path)


def sync(path: str) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_space(directory: str, needed: int) -> None:
    """Raise StoreError if fewer than `needed` bytes are free where `directory` lies."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise cannot_write(directory, f"{free / 1e9:.2f} GB free, {needed / 1e9:.2f} GB needed")


def cannot_write(path: str | Path, reason: object) -> StoreError:
    return StoreError(f"cannot write {path}: {reason}; free some space or lower weights.keep_versions")


def as_bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a contiguous CPU tensor, uint8 `[n]`, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def tensor_checksum(tensor: Tensor) -> str:
    """xxh3-128 of a contiguous CPU tensor's bytes, hex."""
    return checksum(as_bytes(tensor))


def checksum(data: Any) -> str:
    """xxh3-128 of a buffer, hex."""
    return xxhash.xxh3_128_hexdigest(data)
