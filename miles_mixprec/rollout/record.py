"""Sampler data as the trainer's batch carries it: numpy only, one entry per sample, aligned to the whole response."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Support:
    """The tokens that top-p/top-k kept, one ragged row per response token.

    Row r is `ids[offsets[r]:offsets[r + 1]]`. Rows of tool and observation tokens are empty. `log_probs` are
    temperature-scaled and normalised on the row.
    """

    offsets: np.ndarray  # int64 [R + 1]
    ids: np.ndarray  # int32 [N]
    log_probs: np.ndarray  # float32 [N]


@dataclass(frozen=True)
class Source:
    """Where a sample was drawn, and at which weight version each of its tokens."""

    pool: str
    view: str
    weight_versions: np.ndarray  # int32 [R], -1 on observation tokens
    temperature: float
