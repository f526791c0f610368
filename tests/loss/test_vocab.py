import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_mixprec.loss.vocab import Shard, score_head, score_support

F64 = torch.float64


def make(rows=9, vocab=40, padded=48, k=5, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, padded, generator=generator, dtype=F64) * 3
    logits[:, vocab:] = 60.0
    head = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(rows)])
    head[1, 2:] = -1
    sampled = torch.randint(0, vocab, (rows,), generator=generator)
    if k:
        sampled[2] = head[2, 0]
    return logits.to(dtype), sampled, head


def test_matches_log_softmax():
    logits, sampled, head = make()
    scores = score_head(logits, sampled, head, shard=Shard(40), temperature=0.7, entropy=True)
    log_p = torch.log_softmax(logits[:, :40] / 0.7, -1)
    inside = torch.zeros(9, 40, dtype=torch.bool)
    for row, ids in zip(inside, head, strict=True):
        row[ids[ids >= 0]] = True
    expected = log_p.gather(1, head.clamp(min=0)).masked_fill(head < 0, -torch.inf)
    assert torch.allclose(scores.head, expected, atol=1e-13)
    assert torch.allclose(scores.sampled, log_p.gather(1, sampled[:, None])[:, 0], atol=1e-13)
    assert torch.allclose(scores.tail, log_p.masked_fill(inside, -torch.inf).logsumexp(1), atol=1e-13)
    assert torch.allclose(scores.entropy, -(log_p.exp() * log_p).sum(1), atol=1e-13)


@pytest.mark.parametrize("k", [0, 5])
def test_gradcheck_head(k):
    logits, sampled, head = make(rows=5, vocab=14, padded=16, k=k)

    def scores(z):
        result = score_head(z, sampled, head, shard=Shard(14), temperature=1.3, chunk_rows=2)
        return result.head.masked_fill(head < 0, 0.0), result.sampled, result.tail

    assert torch.autograd.gradcheck(scores, logits.requires_grad_())


def test_gradcheck_support():
    logits, _, _ = make(rows=5, vocab=14, padded=16)
    offsets, ids = torch.tensor([0, 3, 3, 5, 6, 8]), torch.tensor([1, 2, 3, 4, 13, 6, 0, 7])
    assert torch.autograd.gradcheck(
        lambda z: score_support(z, offsets, ids, shard=Shard(14), temperature=1.3), logits.requires_grad_()
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(0, 6))
def test_chunks_and_row_order_change_nothing(seed, chunk_rows, k):
    logits, sampled, head = make(seed=seed, k=k)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    results = []
    for rows, take in ((None, torch.arange(9)), (order, order)):
        z = logits.clone().requires_grad_()
        scores = score_head(
            z, sampled[take], head[take], shard=Shard(40), rows=rows, chunk_rows=None if rows is None else chunk_rows
        )
        torch.autograd.backward(
            [scores.sampled.sum() + 2 * scores.tail.sum() + scores.head.masked_fill(head[take] < 0, 0).sum()]
        )
        results.append((scores.sampled.sum(), scores.tail.sum(), z.grad))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_rows_that_are_not_asked_for_have_no_gradient():
    logits, sampled, head = make()
    logits[[0, 4]] = torch.nan
    rows = torch.tensor([7, 2, 3])
    z = logits.requires_grad_()
    score_head(z, sampled[rows], head[rows], shard=Shard(40), rows=rows).sampled.sum().backward()
    untouched = [r for r in range(9) if r not in rows.tolist()]
    assert z.grad[untouched].eq(0).all() and z.grad[rows].abs().sum() > 0


@pytest.mark.parametrize("padding", [0, 8, 21])
def test_padding_columns_do_not_count(padding):
    logits, sampled, head = make(vocab=40, padded=40)
    padded = torch.cat((logits, torch.full((9, padding), 60.0, dtype=F64)), dim=1).requires_grad_()
    logits.requires_grad_()
    for z in (logits, padded):
        score_head(z, sampled, head, shard=Shard(40)).tail.sum().backward()
    assert torch.allclose(padded.grad[:, :40], logits.grad, atol=1e-14) and padded.grad[:, 40:].eq(0).all()


def test_a_thin_tail_keeps_its_digits():
    """fp32: the mass off the head is 1e-9, far below the rounding of the mass on it."""
    p = torch.full((1, 64), 1e-9 / 32, dtype=F64)
    p[:, :32] = (1 - 1e-9) / 32
    scores = score_head(p.log().float(), torch.tensor([0]), torch.arange(32)[None], shard=Shard(64))
    assert scores.tail.exp().item() == pytest.approx(1e-9, rel=1e-5)
    assert 1 - scores.head.exp().sum().item() != pytest.approx(1e-9, rel=0.5)


def test_bf16_logits_are_cast_before_the_temperature():
    logits, sampled, head = make(dtype=torch.bfloat16)
    z = logits.requires_grad_()
    scores = score_head(z, sampled, head, shard=Shard(40), temperature=0.7)
    expected = torch.log_softmax(logits.detach()[:, :40].double() / 0.7, -1).gather(1, sampled[:, None])[:, 0]
    assert scores.sampled.dtype == torch.float32
    assert (scores.sampled - expected).abs().max() < 2e-6
    scores.sampled.sum().backward()
    assert z.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_the_size_of_the_logits_is_kept(dtype):
    """The graph holds the caller's own logits, and else only [T, k] and [T]."""
    logits, sampled, head = make(rows=64, vocab=1000, padded=1024, dtype=dtype)
    z = logits.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        score_head(z, sampled, head, shard=Shard(1000)).sampled.sum()
        score_support(z, torch.arange(65) * 3, torch.arange(192) % 1000, shard=Shard(1000)).sum()
    others = [t for t in kept if t.data_ptr() != z.data_ptr()]
    assert others and max(t.numel() for t in others) <= 64 * 6
