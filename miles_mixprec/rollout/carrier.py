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
from miles_mixprec.rollout.record import SamplerRecord

FIELD = "prompt"
VERSION = 1


def pack(record: SamplerRecord) -> bytes:
    return _encoder.encode([VERSION, record])


def unpack(blob: bytes) -> SamplerRecord:
    """The record packed in `blob`. Raises ContractError for bytes that `pack` did not write."""
    try:
        version, record = _envelopes.decode(blob)
        if version != VERSION:
            raise ContractError(f"carrier format {version}: this package reads {VERSION}; use one version everywhere")
        return _records.decode(record)
    except msgspec.MsgspecError as error:
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
        "mixprec_source": records,
    }


def _array(array: np.ndarray) -> list[Any]:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [little.dtype.str, list(little.shape), np.ascontiguousarray(little).tobytes()]


def _restore(_: type, value: list[Any]) -> np.ndarray:
    dtype, shape, data = value
    return np.frombuffer(data, dtype=dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_array)
_envelopes = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_records = msgspec.msgpack.Decoder(SamplerRecord, dec_hook=_restore)
