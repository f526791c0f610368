"""One sampler record as bytes, for the one free-form field per sample that stock Miles carries to the trainer.

The field is `prompt` of the training data: Miles moves it with its sample through data-parallel splitting and the
object store and reads nothing of it. Format: MessagePack of the record's fields, every array as (dtype, shape,
little-endian bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from miles_mixprec.errors import ContractError
from miles_mixprec.rollout.record import SamplerRecord, Support

FIELD = "prompt"
VERSION = 1

_encoder = msgspec.msgpack.Encoder()
_ARRAYS = ("turn_offsets", "weight_versions", "topk_token_ids", "topk_log_probs")
_SUPPORT = ("offsets", "ids", "log_probs")
_PLAIN = ("pool", "view", "engines", "temperature", "top_p", "top_k")


def pack(record: SamplerRecord) -> bytes:
    values: dict[str, Any] = {name: getattr(record, name) for name in _PLAIN}
    values |= {name: _array(getattr(record, name)) for name in _ARRAYS}
    support = record.support
    values["support"] = None if support is None else {name: _array(getattr(support, name)) for name in _SUPPORT}
    return _encoder.encode([VERSION, values])


def unpack(blob: bytes) -> SamplerRecord:
    """The record packed in `blob`. Raises ContractError for bytes that `pack` did not write."""
    try:
        version, values = msgspec.msgpack.decode(blob)
        if version != VERSION:
            raise ContractError(f"carrier format {version}: this package reads {VERSION}; use one version everywhere")
        support = values.pop("support")
        return SamplerRecord(
            **{name: values[name] for name in _PLAIN},
            **{name: _restore(values[name]) for name in _ARRAYS},
            support=support and Support(**{name: _restore(support[name]) for name in _SUPPORT}),
        )
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ContractError(
            f"the carrier field {FIELD!r} holds {blob[:16]!r}..., not a sampler record; nothing else may write it"
        ) from error


def batch_entries(blobs: Sequence[bytes]) -> dict[str, list[Any]]:
    """The batch keys of docs/architecture.md, one entry per sample."""
    records = [unpack(blob) for blob in blobs]
    return {
        "rollout_topk_token_ids": [record.topk_token_ids for record in records],
        "rollout_topk_log_probs": [record.topk_log_probs for record in records],
        "rollout_sampling_mask": [record.support for record in records],
        "mixprec_source": [record.source for record in records],
    }


def _array(array: np.ndarray | None) -> list[Any] | None:
    if array is None:
        return None
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [little.dtype.str, list(little.shape), np.ascontiguousarray(little).tobytes()]


def _restore(value: list[Any] | None) -> Any:
    return None if value is None else np.frombuffer(value[2], dtype=value[0]).reshape(value[1])
