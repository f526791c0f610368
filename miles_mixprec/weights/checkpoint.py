"""Hugging Face directories: a BF16 checkpoint to a view's, and a view's back to BF16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from miles_mixprec.errors import StoreError
from miles_mixprec.weights import encoders
from miles_mixprec.weights.files import cannot_write
from miles_mixprec.weights.store import FILE_BYTES, INDEX

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")


class Checkpoint:
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
    def names(self) -> list[str]:
        return list(self._files)

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.directory / "config.json").read_text())

    def metadata(self, name: str) -> dict[str, str]:
        """The safetensors metadata of the file that holds `name`."""
        return self._files[name].metadata() or {}

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)


def encode_checkpoint(source: Path, view: str, into: Path) -> None:
    """Write the BF16 checkpoint in `source` as `view` into `into`, with its configuration and tokenizer.

    Raises StoreError for a model that is quantised already, and as `encoders.encode` does.
    """
    checkpoint = Checkpoint(Path(source))
    if "quantization_config" in checkpoint.config:
        raise StoreError(f"{source} is quantised already; views are encoded from the BF16 model only")

    def encoded() -> Iterator[tuple[str, Tensor]]:
        for unit in encoders.units(checkpoint.names):
            yield from encoders.encode(view, {name: checkpoint[name] for name in unit}).items()

    names = write_directory(Path(into), encoded())
    _finish(Path(source), Path(into), encoders.view_config(view, checkpoint.config, names))


def decode_checkpoint(source: Path, into: Path) -> None:
    """Write a view's directory as BF16 into `into`: the values of the format, in matrices that any engine runs."""
    checkpoint = Checkpoint(Path(source))
    view = view_of(checkpoint.config)
    write_directory(Path(into), decoded(view, checkpoint.names, checkpoint))
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    _finish(Path(source), Path(into), config)


def decoded(
    view: str, names: Iterable[str], tensors: Mapping[str, Tensor] | Checkpoint
) -> Iterator[tuple[str, Tensor]]:
    """BF16 tensors of a view's, one matrix at a time."""
    matrices: dict[str, list[str]] = {}
    for name in sorted(names):
        matrices.setdefault(encoders.matrix_of(name), []).append(name)
    for parts in matrices.values():
        yield from encoders.decode(view, {name: tensors[name] for name in parts}).items()


def view_of(config: Mapping[str, Any]) -> str:
    """The view whose `quantization_config` a `config.json` holds. Raises StoreError for one that no view writes."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return "bf16"
    for view, form in encoders.FORMATS.items():
        ours = form.config([])
        if all(
            quantization.get(key) == ours.get(key)
            for key in ("quant_method", "quant_algo", "format", "weight_block_size")
        ):
            return view
    raise StoreError(f"quantization_config {quantization.get('quant_method')!r} is not one that a view writes")


def write_directory(into: Path, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Write tensors as `model-*.safetensors` with an index, in files of bounded size. Returns their names.

    Raises StoreError if the disk is full.
    """
    into.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    size = total = files = 0

    def flush() -> None:
        nonlocal pending, size, files
        name = f"model-{files:05d}.safetensors"
        try:
            safetensors.torch.save_file(pending, into / name, metadata={"format": "pt"})
        except (OSError, safetensors.SafetensorError) as error:
            raise cannot_write(into / name, error) from error
        weight_map.update(dict.fromkeys(pending, name))
        pending, size, files = {}, 0, files + 1

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > FILE_BYTES:
            flush()
        pending[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    if pending:
        flush()
    (into / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return list(weight_map)


def _finish(source: Path, into: Path, config: Mapping[str, Any]) -> None:
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name not in ("config.json", "manifest.json"):
            shutil.copyfile(path, into / path.name)
    (into / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
