"""Which response tokens a context-parallel rank scores, and on which rows of its logits they lie.

Position l of a sequence predicts token l + 1, so response token r of a sample with `prompt` prompt tokens is scored at
position prompt + r - 1. A rank holds, per sample,

    cp = 1       every position
    zigzag       chunks `rank` and `2 cp - 1 - rank` of 2 cp equal ones (Megatron's load balancing)
    all-gather   one contiguous chunk: of the concatenated samples (thd), of each padded sample (bshd)

and its logits [N, V], flattened over the batch, hold those positions in order; thd packs samples, bshd pads each to
`max_seq_len`. Zigzag chunks are of the sample's own length in thd (rounded up), of `max_seq_len` in bshd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """How a micro-batch lies on one rank."""

    total_lengths: Sequence[int]  # prompt and response
    response_lengths: Sequence[int]
    max_seq_lens: Sequence[int] | None  # set in bshd
    cp_rank: int = 0
    cp_size: int = 1
    all_gather: bool = False
    local_rows: int = 0  # rows of the rank's logits; read by all-gather over packed samples


@dataclass(frozen=True)
class LocalTokens:
    """The rank's response tokens, samples in order and, within one, positions in order. int64 [n] each."""

    rows: np.ndarray  # of the flattened logits
    sample: np.ndarray
    position: np.ndarray  # in the response


def local_tokens(layout: Layout) -> LocalTokens:
    rows, sample, position = [], [], []
    for i, (first, last, shift) in _spans(layout):
        prompt = layout.total_lengths[i] - layout.response_lengths[i]
        first, last = max(first, prompt - 1), min(last, layout.total_lengths[i] - 1)
        span = np.arange(first, max(first, last), dtype=np.int64)
        rows.append(span + shift)
        sample.append(np.full(span.size, i, dtype=np.int64))
        position.append(span - (prompt - 1))
    join = np.concatenate if rows else (lambda _: np.zeros(0, dtype=np.int64))
    return LocalTokens(join(rows), join(sample), join(position))


def _spans(layout: Layout) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield (sample, (first position held, past the last one, row - position))."""
    rank, size = layout.cp_rank, layout.cp_size
    padded = layout.max_seq_lens
    packed = 0  # rows (or, under all-gather thd, positions) taken by the samples before
    for i, total in enumerate(layout.total_lengths):
        length = total if padded is None else padded[i]
        if size == 1:
            yield i, (0, length, packed)
            packed += length
        elif not layout.all_gather:
            chunk = -(-length // (2 * size))
            for start, base in ((rank * chunk, packed), ((2 * size - 1 - rank) * chunk, packed + chunk)):
                yield i, (start, start + chunk, base - start)
            packed += 2 * chunk
        elif padded is None:
            start = rank * layout.local_rows - packed
            yield i, (start, start + layout.local_rows, -start)
            packed += length
        else:
            chunk = length // size
            yield i, (rank * chunk, (rank + 1) * chunk, packed - rank * chunk)
            packed += chunk
