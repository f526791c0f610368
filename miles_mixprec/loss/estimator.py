"""The policy-gradient estimator: score centering, importance weights, and replay of the sampler's support.

One response token y, drawn from the sampler's distribution q and scored by the trainer's p, with advantage A and
weight rule f. The gradient of the loss with respect to the scaled logits u = z / T is

    g = -A [ w (e_y - p) - C ]         w = f(p_y / q_y),   C = E_{v ~ q}[ f(p_v / q_v) (e_v - p) ]

The first part alone is REINFORCE. Under a constant A its mean is -A C, a pull of p toward q that has nothing to do
with the reward; C takes it out, and nothing else: E_q[g] = -Cov_q(A, w s) (score centering, arXiv 2609.20807).
With m_v = q_v f(p_v / q_v) for each token, C needs q on every token:

    support   q is zero off the recorded set S and p is renormalised on S: exact, for any f.
    head      q is recorded on the top k, H; off H the sampler is taken to be proportional to p, with the mass
              q_T = 1 - sum_H q left to it: m_T = q_T f(p_T / q_T), where p_T is summed over the tail itself.

    loss = -A ( sg[w] log p_y - sum_H sg[m_v] log p_v - sg[m_T] log p_T )

is a loss with that gradient: its centre is m_v - p_v M on H and p_v (m_T / p_T - M) off it, M = sum_H m + m_T. No
term is a difference of nearly equal numbers, where the usual -sum_H (m_v - m_T/p_T p_v) log p_v hides 1 - sum_H p. The
*value* reported is that of the usual form with both tails floored at 1e-6, so that it compares with published curves.

Example: p = (.4, .25, .15, .1, .07, .03), q = (.3, .3, .05, .2, .1, .05), f = 1, H = {0, 1, 3}, A = 1, y = 1:
REINFORCE drifts by p - q, 0.1 on a logit; with the centre g = (.3, -.7, .12, .2, .056, .024), since q_T = 0.8 p_T.
A token whose weight is 0 keeps its centre, and counts in every mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_mixprec.errors import ContractError
from miles_mixprec.loss import contracts
from miles_mixprec.loss.vocab import HeadScores, Shard, score_head, score_support, segment_sum

WEIGHT_RULES = ("none", "tis", "mis", "is")
VALUE_FLOOR = 1e-6  # of both tail masses in the reported value, as in the paper's code


@dataclass(frozen=True)
class Rule:
    """The weight rule f of a ratio r = p/q, in forms that neither overflow nor divide.

    none  1        tis  r clipped to [low, high], low = 0 as a rule
    is    r        mis  r inside [low, high], 0 outside (IcePop, arXiv 2510.18855); both bounds are inside

    `low` and `high` are ratios: numbers, or tensors [T] with a band for each row. An unbounded r stops at the square
    root of the largest float. Raises ContractError unless 0 <= low < high and high is finite (tis, mis).
    """

    name: str = "none"
    low: float | Tensor = 0.0
    high: float | Tensor = math.inf

    def __post_init__(self) -> None:
        if self.name not in WEIGHT_RULES:
            raise ContractError(f"weight rule {self.name}: use one of {', '.join(WEIGHT_RULES)}")
        fixed = not isinstance(self.low, Tensor) and not isinstance(self.high, Tensor)
        if fixed and self.name in ("tis", "mis") and not 0 <= self.low < self.high < math.inf:
            raise ContractError(f"bounds [{self.low}, {self.high}] of {self.name}: need 0 <= low < high < inf")

    def at(self, index: Tensor | tuple[slice, None]) -> Rule:
        """The rule with per-row bounds taken at `index`."""
        low, high = (b[index] if isinstance(b, Tensor) else b for b in (self.low, self.high))
        return Rule(self.name, low, high)

    def inside(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """low <= p/q <= high, compared in logs; a ratio that equals a bound up to rounding is inside."""
        log_ratio = log_p - log_q
        slack = 4 * torch.finfo(log_p.dtype).eps * (1 + log_p.abs() + log_q.abs()).clamp(max=1e3)
        return (log_ratio >= _log(self.low) - slack) & (log_ratio <= _log(self.high) + slack)

    def weight(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """f(p/q)."""
        if self.name == "none":
            return torch.ones_like(log_p)
        log_ratio = log_p - log_q
        if self.name == "mis":
            return log_ratio.where(self.inside(log_p, log_q), -math.inf).exp()
        if self.name == "tis":
            return torch.clamp(log_ratio, *_tensors(log_ratio, _log(self.low), _log(self.high))).exp()
        return log_ratio.clamp(max=math.log(torch.finfo(log_p.dtype).max) / 2).exp()

    def mass(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """q f(p/q), without forming the ratio."""
        if self.name == "none":
            return log_q.exp()
        if self.name == "mis":
            return log_p.where(self.inside(log_p, log_q), -math.inf).exp()
        if self.name == "tis":
            q = log_q.exp()
            return torch.clamp(log_p.exp(), *_tensors(q, q * self.low, q * self.high))
        return log_p.exp()


@dataclass(frozen=True)
class Estimate:
    """Per-token results [T]; only `loss` and `log_p` carry a gradient.

    The masses are those of the head or of the support. Without a centre they are zero.
    """

    loss: Tensor
    log_p: Tensor  # trainer's log-prob of the sampled token, on the support where there is one
    log_q: Tensor  # sampler's, from the head or support row where the token is in it
    weight: Tensor  # w
    entropy: Tensor
    sampler_mass: Tensor  # sum_H q
    trainer_mass: Tensor  # sum_H p
    sampler_tail: Tensor  # q_T
    trainer_tail: Tensor  # p_T
    drift: Tensor  # sum |q - p|: the L1 norm of the logit gradient that centering removes, at A = 1


def token_losses(
    logits: Tensor,
    sampled_ids: Tensor,
    sampled_log_q: Tensor,
    advantages: Tensor,
    *,
    rule: Rule,
    centering: bool,
    temperature: float = 1.0,
    head_ids: Tensor | None = None,
    head_log_q: Tensor | None = None,
    support_offsets: Tensor | None = None,
    support_ids: Tensor | None = None,
    support_log_q: Tensor | None = None,
    active: Tensor | None = None,
    shard: Shard | None = None,
    tail_floor: float | None = None,
) -> Tensor:
    """Per-token losses [T], fp32 or (for fp64 logits) fp64; the sum's gradient arrives in `logits`' dtype.

    logits          [T, V] bf16, fp32 or fp64, not divided by the temperature; row t predicts token t. With `shard`,
                    this rank's [T, V/TP] slice.
    sampled_ids     [T] integers; `sampled_log_q` [T] is log q of them, in nats, at the sampling temperature and,
                    with a support, normalised on it
    advantages      [T]
    rule            f, with bounds as ratios
    centering       subtract C; needs a head or a support
    temperature     of the sampler, > 0
    head_*          [T, k] ids (-1 padded) and log q of the sampler's most likely tokens (Rule: H may not depend on y)
    support_*       offsets [T + 1], ids and log q [M] of the kept sets; replaces the head
    active          [T] bool; other rows may hold anything, NaN included, and yield loss 0 and gradient 0
    tail_floor      None: exact tails. A number floors both tail masses as published implementations do (1e-6)

    Raises ContractError for data that contradicts itself (`loss.contracts`), naming row and value.
    """
    active = torch.ones_like(sampled_ids, dtype=torch.bool) if active is None else active.bool()
    shard = shard or Shard(logits.size(-1))
    if not (math.isfinite(temperature) and temperature > 0):
        raise ContractError(f"temperature {temperature}: must be finite and above 0")
    _check_shapes(logits, active, (sampled_ids, sampled_log_q, advantages), head_ids, head_log_q)
    row = active.nonzero()[:, 0]
    rows, rule = row.cpu(), rule.at(row)
    sampled_ids, sampled_log_q, advantages = sampled_ids[row], sampled_log_q[row], advantages[row]
    own = sampled_ids, sampled_log_q, advantages, shard.size
    if support_offsets is not None:
        if support_ids is None or support_log_q is None:
            raise ContractError("a support needs support_ids and support_log_q beside support_offsets")
        contracts.require(contracts.check_offsets(support_offsets, support_ids, support_log_q, active.numel()))
        offsets, ids, log_q = _take_rows(support_offsets, row, support_ids, support_log_q)
        contracts.require(contracts.check_support(offsets, ids, log_q, *own))
        log_p = score_support(logits, offsets, ids, shard=shard, rows=rows, temperature=temperature)
        estimate = on_support(log_p, offsets, ids, log_q, sampled_ids, advantages, rule, centering)
    else:
        if head_ids is None or head_log_q is None:
            if centering:
                raise ContractError("score centering needs head_ids and head_log_q, or a support")
            head_ids, head_log_q = empty_head(sampled_ids, sampled_log_q)
        else:
            head_ids, head_log_q = head_ids[row], head_log_q[row]
        contracts.require(contracts.check_head(head_ids, head_log_q, *own))
        scores = score_head(logits, sampled_ids, head_ids, shard=shard, rows=rows, temperature=temperature)
        estimate = on_head(
            scores, head_ids, head_log_q, sampled_ids, sampled_log_q, advantages, rule, centering, tail_floor
        )
    return estimate.loss.new_zeros(active.numel()).index_put((row,), estimate.loss)


def empty_head(sampled_ids: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """A head of no tokens, ids and log q [T, 0], for arms that record none."""
    return sampled_ids.new_empty(sampled_ids.numel(), 0), log_q.new_empty(log_q.numel(), 0)


def on_head(
    scores: HeadScores,
    head_ids: Tensor,
    head_log_q: Tensor,
    sampled_ids: Tensor,
    sampled_log_q: Tensor,
    advantages: Tensor,
    rule: Rule,
    centering: bool,
    tail_floor: float | None = None,
) -> Estimate:
    """The estimate from `score_head` of the same rows; shapes as in `token_losses`, all rows active and checked."""
    valid = head_ids >= 0
    log_q_head = head_log_q.to(scores.head.dtype).masked_fill(~valid, -math.inf)
    log_p_head = scores.head.masked_fill(~valid, 0.0)
    is_sampled = head_ids == sampled_ids[:, None]
    own_log_q = sampled_log_q.to(log_q_head.dtype)
    log_q = log_q_head.masked_fill(~is_sampled, 0.0).sum(dim=1).where(is_sampled.any(dim=1), own_log_q)
    with torch.no_grad():
        weight = rule.weight(scores.sampled, log_q)
    surrogate = weight * scores.sampled
    zero = torch.zeros_like(weight)
    sampler_mass = trainer_mass = sampler_tail = trainer_tail = drift = zero
    value = surrogate.detach()
    if centering:
        with torch.no_grad():
            p, q = scores.head.exp(), log_q_head.exp()
            sampler_mass, trainer_mass, trainer_tail = q.sum(dim=1), p.sum(dim=1), scores.tail.exp()
            sampler_tail = _sampler_tail(log_q_head, head_log_q.dtype)
            mass = rule.at((slice(None), None)).mass(scores.head, log_q_head).masked_fill_(~valid, 0.0)
            tail_mass = _tail_mass(rule, trainer_tail, sampler_tail, tail_floor)
            coefficient = _tail_coefficient(rule, trainer_tail, sampler_tail, VALUE_FLOOR)
            value = value - ((mass - coefficient[:, None] * p) * log_p_head).sum(dim=1)
            drift = (p - q).abs().sum(dim=1) + (trainer_tail - sampler_tail).abs()
        centre = (mass * log_p_head).sum(dim=1) + tail_mass * scores.tail.masked_fill(tail_mass == 0, 0.0)
        surrogate = surrogate - centre
    loss = -advantages.to(value.dtype) * (surrogate - surrogate.detach() + value)
    masses = sampler_mass, trainer_mass, sampler_tail, trainer_tail, drift
    return Estimate(loss, scores.sampled, log_q, weight, scores.entropy, *masses)


def on_support(
    log_p: Tensor,
    offsets: Tensor,
    ids: Tensor,
    log_q: Tensor,
    sampled_ids: Tensor,
    advantages: Tensor,
    rule: Rule,
    centering: bool,
) -> Estimate:
    """The estimate from `score_support` of the same rows; shapes as in `token_losses`, all rows active and checked."""
    rows = sampled_ids.numel()
    segment = torch.repeat_interleave(offsets.diff(), output_size=ids.numel())
    log_q = log_q.to(log_p.dtype)
    is_sampled = ids == sampled_ids[segment]
    log_p_y, log_q_y = (segment_sum(x.where(is_sampled, 0.0), segment, rows) for x in (log_p, log_q))
    with torch.no_grad():
        weight = rule.weight(log_p_y, log_q_y)
        p, q = log_p.exp(), log_q.exp()
        sampler_mass, trainer_mass = segment_sum(q, segment, rows), segment_sum(p, segment, rows)
        drift = segment_sum((p - q).abs(), segment, rows)
        entropy = -segment_sum(p * log_p, segment, rows)
    score = weight * log_p_y
    if centering:
        with torch.no_grad():
            mass = rule.at(segment).mass(log_p, log_q)
        score = score - segment_sum(mass * log_p, segment, rows)
    no_tail = torch.zeros_like(weight)
    masses = sampler_mass, trainer_mass, no_tail, no_tail, drift
    return Estimate(-advantages.to(score.dtype) * score, log_p_y, log_q_y, weight, entropy, *masses)


def _take_rows(offsets: Tensor, rows: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
    """Rows `rows` of ragged data as (new offsets, *new columns)."""
    counts = offsets.diff()[rows]
    new_offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    index = torch.arange(int(new_offsets[-1]), device=offsets.device)
    index += torch.repeat_interleave(offsets[rows] - new_offsets[:-1], counts, output_size=index.numel())
    return new_offsets, *(column[index] for column in columns)


def _check_shapes(
    logits: Tensor, active: Tensor, columns: tuple[Tensor, ...], head_ids: Tensor | None, head_log_q: Tensor | None
) -> None:
    rows = logits.size(0)
    if any(x.shape != (rows,) for x in (active, *columns)):
        shapes = [tuple(x.shape) for x in (active, *columns)]
        raise ContractError(f"{rows} rows of logits with per-token inputs of shapes {shapes}; each must be ({rows},)")
    heads = [tuple(x.shape) for x in (head_ids, head_log_q) if x is not None]
    if any(len(shape) != 2 or shape[0] != rows or shape != heads[0] for shape in heads):
        raise ContractError(f"{rows} rows of logits with a head of shapes {heads}; both must be ({rows}, k)")


def _sampler_tail(log_q: Tensor, recorded: torch.dtype) -> Tensor:
    """q_T = 1 - sum_H q, in fp64. A head that exceeds one by more than its rounding leaves the published floor."""
    log_q = log_q.double()
    q = log_q.exp()
    left = 1 - q.sum(dim=1)
    rounding = torch.finfo(recorded).eps / 2 * (q * log_q.masked_fill(q == 0, 0.0).abs()).sum(dim=1)
    return torch.where(left < -rounding, VALUE_FLOOR, left.clamp(min=0))


def _tail_mass(rule: Rule, p: Tensor, q: Tensor, floor: float | None) -> Tensor:
    """m_T. Nothing is left off the head where p_T is zero."""
    mass = rule.mass(p.double().log(), q.log()) if floor is None else _tail_coefficient(rule, p, q, floor) * p
    return mass.to(p.dtype).masked_fill(p < torch.finfo(p.dtype).tiny, 0.0)


def _tail_coefficient(rule: Rule, p: Tensor, q: Tensor, floor: float) -> Tensor:
    """alpha = rho f(1/rho) with both tails floored."""
    p_floored, q = p.double().clamp(min=floor), q.clamp(min=floor)
    return (rule.mass(p_floored.log(), q.log()) / p_floored).to(p.dtype)


def _log(bound: float | Tensor) -> float | Tensor:
    if isinstance(bound, Tensor):
        return bound.log()
    return math.log(bound) if bound > 0 else -math.inf


def _tensors(like: Tensor, *bounds: float | Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.as_tensor(b, dtype=like.dtype, device=like.device) for b in bounds)
