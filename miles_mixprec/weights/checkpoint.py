"""Hugging Face directories: a BF16 checkpoint to a view's, and a view's back to BF16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from miles_mixprec.errors import StoreError
from miles_mixprec.weights import encoders
from miles_mixprec.weights.files import write_tensors
from miles_mixprec.weights.store import FILE_BYTES
from miles_mixprec.weights.version import INDEX

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")


class Checkpoint(Mapping[str, Tensor]):
    """Named tensors of a Hugging Face directory, mapped and read one at a time. Raises StoreError if it has none."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}
        index = directory / INDEX
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else None
        for path in sorted(directory.glob("*.safetensors")):
            if files is not None and path.name not in files:
                continue
            file = safetensors.safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)
        if not self._files:
            raise StoreError(f"{directory} holds no *.safetensors; convert the model to safetensors first")

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.directory / "config.json").read_text())

    def metadata(self, name: str) -> dict[str, str]:
        """The safetensors metadata of the file that holds `name`."""
        return self._files[name].metadata() or {}

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def encode_checkpoint(source: Path, view: str, into: Path) -> None:
    """Write the BF16 checkpoint in `source` as `view` into `into`, with its configuration and tokenizer.

    Raises StoreError for a model that is quantised already, and as `encoders.encode` does.
    """
    checkpoint = Checkpoint(source)
    if "quantization_config" in checkpoint.config:
        raise StoreError(f"{source} is quantised already; views are encoded from the BF16 model only")

    def encoded() -> Iterator[tuple[str, Tensor]]:
        for unit in encoders.units(checkpoint):
            yield from encoders.encode(view, {name: checkpoint[name] for name in unit}).items()

    names = write_directory(into, encoded())
    _finish(source, into, encoders.view_config(view, checkpoint.config, names))


def decode_checkpoint(source: Path, into: Path) -> None:
    """Write a view's directory as BF16 into `into`: the values of the format, in matrices that any engine runs."""
    checkpoint = Checkpoint(source)
    config = checkpoint.config
    write_directory(into, encoders.decode(view_of(config), checkpoint))
    config.pop("quantization_config", None)
    _finish(source, into, config)


def view_of(config: Mapping[str, Any]) -> str:
    """The view whose `quantization_config` a `config.json` holds. Raises StoreError for one that no view writes."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return "bf16"
    for view, form in encoders.FORMATS.items():
        telling = ("quant_method", "quant_algo", "format", "weight_block_size")
        if all(quantization.get(key) == form.config.get(key) for key in telling):
            return view
    raise StoreError(f"quantization_config {quantization.get('quant_method')!r} is not one that a view writes")


def write_directory(into: Path, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Write tensors as `model-*.safetensors` with an index, in files of bounded size. Returns their names.

    Raises StoreError if the disk is full.
    """
    into.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for i, batch in enumerate(_batches(tensors)):
        name = f"model-{i:05d}.safetensors"
        write_tensors(into / name, batch)
        weight_map |= dict.fromkeys(batch, name)
        total += sum(tensor.nbytes for tensor in batch.values())
    (into / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return list(weight_map)


def _batches(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Tensors by the file: as many as fit into FILE_BYTES, at least one."""
    batch: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > FILE_BYTES:
            yield batch
            batch, size = {}, 0
        batch[name] = tensor
        size += tensor.nbytes
    if batch:
        yield batch


def _finish(source: Path, into: Path, config: Mapping[str, Any]) -> None:
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name not in ("config.json", "manifest.json"):
            shutil.copyfile(path, into / path.name)
    (into / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
