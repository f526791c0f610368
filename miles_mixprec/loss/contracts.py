"""What sampler data must satisfy before it may move a weight: vectorised, always on, nothing repaired.

Each `check_*` looks at T response tokens at once and returns findings, one per check: where it fails, and the value to
show. `require` turns the first failure into a ContractError; `judge` applies the policy of each check, for a batch of
samples from several pools: `reject` takes the whole sample out of the loss (its tokens still count in every mean),
`stop` ends the run. Data is rejected by default, contradictions of the configuration stop the run; `algo.contracts`
overrides either, per check.

A finding costs one pass over the [T, k] head or the [M] support members; the host learns of all of them in one copy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles_mixprec.errors import ConfigError, ContractError
from miles_mixprec.loss.vocab import segment_sum

logger = logging.getLogger(__name__)

MASS_TOLERANCE = 1e-3  # of a probability mass, absolute
LOG_Q_TOLERANCE = 1e-3  # nats, between the sampled token's own log-prob and the one in its row

POLICIES = ("reject", "stop")
_VOCAB = "outside the vocabulary; set --vocab-size to the rows that the sampler scores"
_RECORD = "the sampler's record is damaged: check the engine's version and top-k/top-p reply"
_WHAT: dict[str, str] = {
    "shape": "fields of the record have other lengths than the response ({value:.0f} tokens); " + _RECORD,
    "temperature": "sampled at temperature {value:g}, not at algo.temperature; send requests with the latter",
    "source": "the pool or view is not in the fleet; register it under fleet.pools",
    "missing": "no head or support was recorded, which the arm needs; set --custom-generate-function-path to the hook",
    "token_id": "sampled id {value:.0f} is " + _VOCAB,
    "log_q": "log q of the sampled token is {value:g}, not a log-probability; " + _RECORD,
    "advantage": "advantage is {value:g}; check the reward function",
    "head_id": "head holds id {value:.0f}, " + _VOCAB,
    "head_duplicate": "head holds id {value:.0f} twice; " + _RECORD,
    "head_log_q": "head holds log q {value:g}, not a log-probability; " + _RECORD,
    "head_mass": "head mass is {value:.6g}, above 1; log-probs of two distributions are mixed",
    "head_empty": "head holds {value:.0f} ids; " + _RECORD,
    "disagreement": "log q of the sampled token and of its row differ by {value:.3g} nats; " + _RECORD,
    "offsets": "support offsets or sizes are inconsistent (at {value:.0f}); " + _RECORD,
    "support_id": "support holds id {value:.0f}, " + _VOCAB,
    "support_duplicate": "support holds id {value:.0f} twice; " + _RECORD,
    "support_log_q": "support holds log q {value:g}, not a log-probability; " + _RECORD,
    "support_mass": "support mass is {value:.6g}, not 1; request log-probs normalised on the support",
    "support_sampled": "sampled id {value:.0f} is missing from its support; the engine truncated or rebuilt the set",
}
DEFAULT_POLICY = {name: "stop" if name in ("temperature", "source", "missing") else "reject" for name in _WHAT}


def check_policy(policy: Mapping[str, str]) -> None:
    """Raise ConfigError unless `policy` maps known checks to `reject` or `stop`."""
    for check, action in policy.items():
        if check not in DEFAULT_POLICY or action not in POLICIES:
            raise ConfigError(
                f"algo.contracts.{check}={action}: use reject or stop for one of {', '.join(sorted(DEFAULT_POLICY))}"
            )


class Finding(NamedTuple):
    check: str  # key of DEFAULT_POLICY
    bad: Tensor  # [T] bool
    value: Tensor  # [T], shown for a bad row


class Violation(NamedTuple):
    """One failed check of one sample."""

    check: str
    sample: int
    token: int | None  # position in the response; None when the whole sample is at fault
    pool: str
    value: float

    def __str__(self) -> str:
        token = "" if self.token is None else f" response token {self.token}:"
        what = _WHAT[self.check].format(value=self.value)
        return f"sample {self.sample} of pool {self.pool}:{token} {what} [{self.check}]"


def check_sampled(sampled_ids: Tensor, log_q: Tensor, advantages: Tensor, vocab_size: int) -> list[Finding]:
    """[T] each: ids in [0, vocab_size), log q finite and at most 0, advantages finite."""
    return [
        Finding("token_id", (sampled_ids < 0) | (sampled_ids >= vocab_size), sampled_ids),
        Finding("log_q", ~_is_log_prob(log_q), log_q),
        Finding("advantage", ~advantages.isfinite(), advantages),
    ]


def check_head(
    head_ids: Tensor, head_log_q: Tensor, sampled_ids: Tensor, log_q: Tensor, advantages: Tensor, vocab_size: int
) -> list[Finding]:
    """`check_sampled`, and [T, k] heads: distinct ids in range, finite log q, mass at most 1, own log q agrees."""
    findings = check_sampled(sampled_ids, log_q, advantages, vocab_size)
    if head_ids.size(1) == 0:
        return findings
    valid = head_ids >= 0
    order = head_ids.sort(dim=1).values
    twice = torch.zeros_like(order, dtype=torch.bool)
    twice[:, 1:] = (order[:, 1:] == order[:, :-1]) & (order[:, 1:] >= 0)
    bad_id = (head_ids >= vocab_size) | (head_ids < -1)
    bad_log_q = valid & ~_is_log_prob(head_log_q)
    mass = head_log_q.where(valid, -torch.inf).exp().sum(dim=1)
    is_sampled = head_ids == sampled_ids[:, None]
    apart = (head_log_q - log_q[:, None]).abs().where(is_sampled, 0.0).sum(dim=1)
    return [
        *findings,
        Finding("head_id", bad_id.any(dim=1), _first(head_ids, bad_id)),
        Finding("head_duplicate", twice.any(dim=1), _first(order, twice)),
        Finding("head_log_q", bad_log_q.any(dim=1), _first(head_log_q, bad_log_q)),
        Finding("head_mass", mass > 1 + MASS_TOLERANCE, mass),
        Finding("head_empty", ~valid.any(dim=1), valid.sum(dim=1)),
        Finding("disagreement", apart > LOG_Q_TOLERANCE, apart),
    ]


def check_support(
    offsets: Tensor,
    ids: Tensor,
    support_log_q: Tensor,
    sampled_ids: Tensor,
    log_q: Tensor,
    advantages: Tensor,
    vocab_size: int,
) -> list[Finding]:
    """`check_sampled`, and ragged supports (offsets [T + 1], consistent): ids distinct, in range and with the sampled
    one among them, log q finite, mass 1, sampled token agrees."""
    rows = sampled_ids.numel()
    segment = torch.repeat_interleave(offsets.diff(), output_size=ids.numel())

    def per_row(bad: Tensor, values: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        shown = torch.full((rows,), -torch.inf, dtype=torch.float64, device=bad.device)
        shown.scatter_reduce_(0, at, values.double().where(bad, -torch.inf), "amax")
        return segment_sum(bad.float(), at, rows) > 0, shown

    # Ids below zero would wrap into the previous row's keys; they fail on their own.
    key, order = (segment * (1 << 32) + ids.clamp(min=-1)).sort()
    twice = torch.zeros_like(ids, dtype=torch.bool)
    twice[1:] = key[1:] == key[:-1]
    is_sampled = ids == sampled_ids[segment]
    mass = segment_sum(support_log_q.double().exp(), segment, rows)
    apart = segment_sum((support_log_q - log_q[segment]).abs().where(is_sampled, 0.0), segment, rows)
    return [
        *check_sampled(sampled_ids, log_q, advantages, vocab_size),
        Finding("support_id", *per_row((ids < 0) | (ids >= vocab_size), ids, segment)),
        Finding("support_duplicate", *per_row(twice, ids[order], segment[order])),
        Finding("support_log_q", *per_row(~_is_log_prob(support_log_q), support_log_q, segment)),
        Finding("support_mass", (mass - 1).abs() > MASS_TOLERANCE, mass),
        Finding("support_sampled", segment_sum(is_sampled.float(), segment, rows) == 0, sampled_ids),
        Finding("disagreement", apart > LOG_Q_TOLERANCE, apart),
    ]


def check_offsets(
    offsets: Tensor | np.ndarray, ids: Tensor | np.ndarray, log_q: Tensor | np.ndarray, rows: int
) -> list[Finding]:
    """One row: offsets [rows + 1] from 0 to M without a step back, ids and log q [M]."""
    size = len(ids)
    good = offsets.shape == (rows + 1,) and ids.shape == log_q.shape == (size,)
    good = good and bool(offsets[0] == 0 and offsets[-1] == size and (offsets[1:] >= offsets[:-1]).all())
    return [Finding("offsets", torch.tensor([not good]), torch.tensor([len(offsets)]))]


def require(findings: Sequence[Finding]) -> None:
    """Raise ContractError for the first failed check."""
    for finding in _failed(findings):
        row = int(finding.bad.nonzero()[0])
        what = _WHAT[finding.check].format(value=float(finding.value[row]))
        raise ContractError(f"row {row}: {what} [{finding.check}]")


def judge(
    findings: Sequence[Finding], sample: np.ndarray, token: np.ndarray, pools: Sequence[str], policy: Mapping[str, str]
) -> set[int]:
    """`settle` what the findings say about each sample. `sample` and `token` [T] say whose row is whose, `pools` is
    one per sample."""
    violations = []
    for finding in _failed(findings):
        rows = finding.bad.numpy().nonzero()[0]
        samples, first = np.unique(sample[rows], return_index=True)
        for at, row in zip(samples.tolist(), rows[first].tolist(), strict=True):
            violations.append(Violation(finding.check, at, int(token[row]), pools[at], float(finding.value[row])))
    return settle(violations, policy)


def settle(violations: Sequence[Violation], policy: Mapping[str, str]) -> set[int]:
    """Samples to reject, which are logged with the first violation of each.

    Raises ContractError for a violation of a check whose policy is `stop`.
    """
    first: dict[int, Violation] = {}
    for violation in violations:
        if policy.get(violation.check, DEFAULT_POLICY[violation.check]) == "stop":
            raise ContractError(str(violation))
        first.setdefault(violation.sample, violation)
    for violation in first.values():
        logger.warning("rejected: %s", violation)
    return set(first)


def _failed(findings: Sequence[Finding]) -> list[Finding]:
    flags = torch.stack([finding.bad.any() for finding in findings]).tolist()
    return [
        Finding(finding.check, finding.bad.cpu(), finding.value.cpu())
        for finding, bad in zip(findings, flags, strict=True)
        if bad
    ]


def _is_log_prob(x: Tensor) -> Tensor:
    return x.isfinite() & (x <= LOG_Q_TOLERANCE)


def _first(values: Tensor, bad: Tensor) -> Tensor:
    return values.gather(1, bad.int().argmax(dim=1, keepdim=True))[:, 0]
