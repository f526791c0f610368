"""Log-probabilities of chosen tokens from vocabulary-parallel logits, in one pass and without an fp32 copy of them.

    u = z / T          z: logits [N, V/TP] of this rank, bf16, fp32 or fp64; cast up first, then divided
    log p_v = u_v - log sum_{v' < vocab_size} exp u_v'

`score_head` scores a dense set H of ids per row together with the sampled token, and returns the log of the mass
*off* H as a sum over the tokens off H, never as 1 - sum_H: that difference has no digits left when the head is
nearly everything. `score_support` scores ragged sets and normalises on them; it reads nothing but their logits.

For the backward pass the first keeps the caller's logits, the ids, and a maximum and a denominator per row; it
recomputes the softmax by chunks of rows and writes the gradient in the logits' dtype. The tensor-parallel group is
used in forward passes only (MAX, then SUM; about 4 (k + 3) bytes a row): the loss is the same on every rank, so
reducing gradients would multiply them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Elements of one fp32 chunk: what stays in a CPU's cache, and what keeps a GPU busy at 256 MB of scratch.
_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}


@dataclass(frozen=True)
class Shard:
    """This rank's slice of the vocabulary: ids `[rank * V/TP, (rank + 1) * V/TP)`, of which ids < `size` exist."""

    size: int  # tokens the sampler's softmax runs over; padding rows beyond it are left out
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def real_columns(self, logits: Tensor) -> int:
        """How many of this rank's columns stand for tokens that exist; they come first."""
        width = logits.size(-1)
        return max(0, min(self.size - self.rank * width, width))

    def columns(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's column of each id, and whether there is one."""
        column = ids.long() - self.rank * logits.size(-1)
        return column, (column >= 0) & (column < self.real_columns(logits))


class HeadScores(NamedTuple):
    """Scores of T rows; differentiable except `entropy`. fp32, or fp64 for fp64 logits."""

    head: Tensor  # [T, k] log p of the head ids, -inf at id -1
    sampled: Tensor  # [T] log p of the sampled tokens
    tail: Tensor  # [T] log of the probability off the head; -inf when nothing is left there
    entropy: Tensor  # [T] nats, over the whole vocabulary; zeros unless asked for


def score_head(
    logits: Tensor,
    sampled_ids: Tensor,
    head_ids: Tensor,
    *,
    shard: Shard,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_rows: int | None = None,
) -> HeadScores:
    """Score `sampled_ids` [T] and `head_ids` [T, k] (distinct in a row, -1 padded, k may be 0) in one pass.

    `logits` is [N, V/TP]; `rows` (int64 [T], on the CPU) picks and orders the rows to score, all of them by default.
    """
    view = _View(shard, rows, temperature, chunk_rows)
    return HeadScores(*_HeadScores.apply(logits, sampled_ids, head_ids, view, entropy))


def score_support(
    logits: Tensor, offsets: Tensor, ids: Tensor, *, shard: Shard, rows: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """log p [M] of ragged id sets, normalised on each: row r holds `ids[offsets[r]:offsets[r + 1]]`.

    `offsets` int64 [T + 1] and `ids` [M] live on the logits' device, `rows` as in `score_head`. Rows may be empty.
    """
    counts = offsets.diff()
    segment = torch.repeat_interleave(counts, output_size=ids.numel())
    logit_rows = segment if rows is None else rows.to(logits.device)[segment]
    selected = _Select.apply(logits, logit_rows, ids, shard, temperature)
    maximum = selected.new_full((counts.numel(),), -math.inf)
    maximum = maximum.scatter_reduce_(0, segment, selected.detach(), "amax")
    shifted = selected - maximum[segment]
    return shifted - segment_sum(shifted.exp(), segment, counts.numel()).log()[segment]


def segment_sum(values: Tensor, segment: Tensor, segments: int) -> Tensor:
    """Sum of `values` [M] by `segment` [M] into [segments]."""
    return values.new_zeros(segments).index_add_(0, segment, values)


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, sampled_ids: Tensor, head_ids: Tensor, view: _View, entropy: bool
    ) -> tuple[Tensor, ...]:
        count, k = head_ids.shape
        shard, real = view.shard, view.shard.real_columns(logits)
        ids = torch.cat((head_ids, sampled_ids[:, None]), dim=1).long()
        maximum = logits.new_empty(count, dtype=_precision(logits))
        # Per row: selected logits [k + 1], then sum of e = exp(u - maximum) and of e (u - maximum), off the head.
        sums = maximum.new_empty(count, k + 3)
        for chunk, u in view.chunks(logits, count):
            column, owned = view.columns(logits, ids[chunk])
            sums[chunk, : k + 1] = u.gather(1, column).masked_fill_(~owned, 0.0)
            maximum[chunk] = u.amax(dim=1).clamp_(min=torch.finfo(u.dtype).min)
            u.sub_(maximum[chunk, None])
            e = u.exp() if entropy else u.exp_()
            e.scatter_(1, column[:, :k], 0.0)
            sums[chunk, k + 1] = e.sum(dim=1)
            sums[chunk, k + 2] = torch.linalg.vecdot(e[:, :real], u[:, :real]) if entropy else 0.0
        top = maximum
        if shard.group is not None:
            top = maximum.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
            shift = maximum - top
            sums[:, k + 2] += shift * sums[:, k + 1]
            sums[:, k + 1 :] *= shift.exp()[:, None]
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=shard.group)
        shifted = sums[:, : k + 1] - top[:, None]
        shifted[:, :k].masked_fill_(head_ids < 0, -math.inf)
        tail, tail_dot = sums[:, k + 1], sums[:, k + 2]
        e_head = shifted[:, :k].exp()
        total = tail + e_head.sum(dim=1)
        log_total = total.log()
        scores = shifted - log_total[:, None]
        if entropy:
            dot = tail_dot + (e_head * shifted[:, :k].masked_fill(head_ids < 0, 0.0)).sum(dim=1)
            row_entropy = log_total - dot / total
        else:
            row_entropy = torch.zeros_like(total)
        ctx.save_for_backward(logits, ids, top, total, tail)
        ctx.view = view
        ctx.mark_non_differentiable(row_entropy)
        return scores[:, :k], scores[:, k], tail.log() - log_total, row_entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_head: Tensor, g_sampled: Tensor, g_tail: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids, top, total, tail = ctx.saved_tensors
        view: _View = ctx.view
        temperature, k = view.temperature, ids.size(1) - 1
        # du_v = g_v [v in H] + g_tail p_v / p_tail [v not in H] + g_sampled [v = y] - p_v g_all, and dz = du / T.
        g_all = (g_head.sum(dim=1) + g_sampled + g_tail) / temperature
        has_tail = tail >= torch.finfo(tail.dtype).tiny
        on_head = -g_all / total
        off_head = on_head + torch.where(has_tail, g_tail / temperature / tail.where(has_tail, 1.0), 0.0)
        g_head, g_sampled = g_head / temperature, g_sampled / temperature
        grad = torch.zeros_like(logits)
        for chunk, u in view.chunks(logits, ids.size(0)):
            column, _ = view.columns(logits, ids[chunk])
            e = u.sub_(top[chunk, None]).exp_()
            values = e.gather(1, column[:, :k]).mul_(on_head[chunk, None]).add_(g_head[chunk])
            e.mul_(off_head[chunk, None])
            e.scatter_(1, column[:, :k], values)
            e.scatter_add_(1, column[:, k:], g_sampled[chunk, None])
            view.write(grad, chunk, e)
        return grad, None, None, None, None


@dataclass(frozen=True)
class _View:
    """The scored rows of a logits shard as chunks of scaled rows, with one column to spare for foreign ids."""

    shard: Shard
    rows: Tensor | None
    temperature: float
    chunk_rows: int | None

    def chunks(self, logits: Tensor, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice into the scored rows, u [n, V/TP + 1]); the buffer is reused, padding columns are -inf."""
        width = logits.size(1)
        elements = _CHUNK_ELEMENTS.get(logits.device.type, _CHUNK_ELEMENTS["cuda"])
        chunk_rows = self.chunk_rows or max(1, elements // (width + 1))
        buffer = logits.new_empty(min(chunk_rows, count), width + 1, dtype=_precision(logits))
        for begin in range(0, count, chunk_rows):
            chunk = slice(begin, min(begin + chunk_rows, count))
            u = buffer[: chunk.stop - begin]
            u[:, :width] = logits[self._span(chunk, logits.device)]
            if self.temperature != 1.0:
                u.div_(self.temperature)
            u[:, self.shard.real_columns(logits) :] = -math.inf
            yield chunk, u

    def columns(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Local column of each id, the spare one where another rank (or nobody) owns it; and whether we own it."""
        column, owned = self.shard.columns(logits, ids)
        return torch.where(owned, column, logits.size(1)), owned

    def write(self, target: Tensor, chunk: slice, values: Tensor) -> None:
        span = self._span(chunk, target.device)
        values = values[:, : target.size(1)]
        if isinstance(span, slice):
            target[span] = values
        else:
            target.index_copy_(0, span, values.to(target.dtype))

    def _span(self, chunk: slice, device: torch.device) -> slice | Tensor:
        """A slice where the chunk's rows follow each other (the rule: rows of a response do), else their indices."""
        if self.rows is None:
            return chunk
        rows = self.rows[chunk]
        first, last = int(rows[0]), int(rows[-1])
        if last - first == rows.numel() - 1 and bool((rows.diff() == 1).all()):
            return slice(first, last + 1)
        return rows.to(device, non_blocking=True)


class _Select(torch.autograd.Function):
    """u = z / T at (row, id) pairs, fp32; ids of other ranks arrive by a SUM."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, ids: Tensor, shard: Shard, temperature: float) -> Tensor:
        local, owned = shard.columns(logits, ids)
        local = local.where(owned, 0)
        selected = logits[rows, local].to(_precision(logits)).div_(temperature).masked_fill_(~owned, 0.0)
        if shard.group is not None:
            dist.all_reduce(selected, op=dist.ReduceOp.SUM, group=shard.group)
        ctx.save_for_backward(rows, local, owned)
        ctx.like = (logits.shape, logits.dtype, temperature)
        return selected

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        rows, local, owned = ctx.saved_tensors
        shape, dtype, temperature = ctx.like
        grad = g.new_zeros(shape, dtype=dtype)
        grad.index_put_((rows, local), (g / temperature).masked_fill_(~owned, 0.0).to(dtype), accumulate=True)
        return grad, None, None, None, None


def _precision(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
