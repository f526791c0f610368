"""What the loss reports: sums over tokens, numerator and denominator apart, the same keys on every micro-batch.

Miles adds metrics up over micro-batches and ranks and divides them all by one count. A ratio of two such sums is the
mean over the group's tokens under any split; `mixprec/<group>/<metric>_num` and `_den` are those two. Groups are
`all`, `pool/<name>`, `view/<name>`, and for the KL also `lag/<0-1|2-3|4-5|6+>`: trainer version - sampled version.
docs/loss.md says what the metrics mean; logs and masses are natural, r = p/q is trainer over sampler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_mixprec.loss.estimator import Estimate, Rule

LAGS = {"lag/0-1": (0, 1), "lag/2-3": (2, 3), "lag/4-5": (4, 5), "lag/6+": (6, math.inf)}
_LOG_TAIL = math.log(5.0)
_LARGEST_RATIO = 1e8  # keeps one absurd token from turning its group's sums into inf
K3_LIMIT = 10.0


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r >= 0, unbiased for KL(q || p) under q with log_ratio = log p/q; at most 10."""
    return (log_ratio.clamp(max=math.log(_LARGEST_RATIO)).expm1() - log_ratio).clamp(max=K3_LIMIT)


@dataclass(frozen=True)
class Pair:
    """Numerator and denominator per token [T]; None counts every token once."""

    num: Tensor
    den: Tensor | None = None


def token_pairs(estimate: Estimate, rule: Rule, lag: Tensor) -> dict[str, Pair]:
    """`lag` [T] float, NaN where the sampled version is unknown."""
    log_p, log_q = estimate.log_p.detach(), estimate.log_q
    log_ratio = log_p - log_q
    known = lag.isfinite()
    bounded = rule.name in ("mis", "tis")
    weight = estimate.weight.clamp(max=_LARGEST_RATIO)
    return {
        "kl": Pair(k3(log_ratio)),
        "log_ratio": Pair(log_ratio.abs()),
        "ratio": Pair(log_ratio.exp().clamp(max=_LARGEST_RATIO)),
        "ratio_tail": Pair((log_ratio.abs() > _LOG_TAIL).float()),
        "masked": Pair((~rule.inside(log_p, log_q)).float() if bounded else torch.zeros_like(log_p)),
        "weight": Pair(weight),
        "weight_sq": Pair(weight.square()),
        "tail_ratio": Pair(estimate.sampler_tail, estimate.trainer_tail),
        "sampler_mass": Pair(estimate.sampler_mass),
        "trainer_mass": Pair(estimate.trainer_mass),
        "drift": Pair(estimate.drift),
        "entropy": Pair(estimate.entropy),
        "lag": Pair(lag.where(known, 0.0), known.float()),
    }


def lag_groups(lag: Tensor) -> dict[str, Tensor]:
    return {name: (lag >= low) & (lag <= high) for name, (low, high) in LAGS.items()}


def sums(pairs: Mapping[str, Pair], groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`mixprec/<group>/<metric>_<num|den>` as 0-d fp32 CPU tensors; groups are [T] bool. One copy to the host."""
    member = torch.stack(list(groups.values())).double()
    columns = [x.double() for pair in pairs.values() for x in (pair.num, pair.den) if x is not None]
    one = torch.ones(member.size(1), dtype=torch.float64, device=member.device)
    totals = (member @ torch.stack([one, *columns], dim=1)).float().cpu()
    result = {}
    for group, row in zip(groups, totals, strict=True):
        values = iter(row[1:])
        for name, pair in pairs.items():
            result[f"mixprec/{group}/{name}_num"] = next(values)
            result[f"mixprec/{group}/{name}_den"] = row[0] if pair.den is None else next(values)
    return result
