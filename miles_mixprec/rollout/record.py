"""Sampler data as the house passes it on: numpy only, aligned to the whole response of one sample.

R is the number of response tokens. Rows of tool and observation tokens are empty: -1 and -inf in dense arrays, no
members in ragged ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Support:
    """The tokens that top-p/top-k kept, one ragged row per response token.

    Row r is `ids[offsets[r]:offsets[r + 1]]`. `log_probs` are temperature-scaled and normalised on the row.
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


@dataclass(frozen=True)
class SamplerRecord(Source):
    """Everything that the sampler recorded about one trajectory."""

    engines: list[str]  # one per turn
    turn_offsets: np.ndarray  # int32 [turns + 1], response offsets at which turns start
    topk_token_ids: np.ndarray | None  # int32 [R, k], most likely first
    topk_log_probs: np.ndarray | None  # float32 [R, k], at the sampling temperature, before any filter
    support: Support | None
    top_p: float
    top_k: int

    def attribution(self) -> list[dict[str, str | int]]:
        """`{pool, engine, view, weight_version}` of every turn; the version is that of the turn's first token."""
        return [
            {
                "pool": self.pool,
                "engine": engine,
                "view": self.view,
                "weight_version": int(self.weight_versions[start]) if start < len(self.weight_versions) else -1,
            }
            for engine, start in zip(self.engines, self.turn_offsets, strict=False)
        ]
