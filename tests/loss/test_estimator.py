import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_mixprec.errors import ContractError
from miles_mixprec.loss.estimator import Rule, token_losses

RULES = [Rule("none"), Rule("is"), Rule("tis", 0.0, 2.0), Rule("tis", 0.5, 1.5), Rule("mis", 0.5, 5.0)]
F64 = torch.float64


def softmax_pair(seed, vocab, noise):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(vocab, generator=generator, dtype=F64) * 2
    log_q = torch.log_softmax(z + noise * torch.randn(vocab, generator=generator, dtype=F64), 0)
    return z, log_q


def expected_gradient(z, q, losses):
    """Sum over y of q_y dL(y)/dz, in one call: row t samples token t."""
    rows = z.expand(q.numel(), -1).clone().requires_grad_()
    (losses(rows) * q).sum().backward()
    return rows.grad.sum(dim=0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.floats(0, 3), st.sampled_from(RULES), st.floats(0.3, 2.0))
def test_no_drift_with_a_full_head(seed, vocab, noise, rule, temperature):
    z, log_q = softmax_pair(seed, vocab, noise)
    drift = expected_gradient(
        z,
        log_q.exp(),
        lambda rows: token_losses(
            rows,
            torch.arange(vocab),
            log_q,
            torch.ones(vocab, dtype=F64),
            rule=rule,
            centering=True,
            temperature=temperature,
            head_ids=torch.arange(vocab).expand(vocab, -1),
            head_log_q=log_q.expand(vocab, -1),
        ),
    )
    assert drift.abs().max() < 1e-12


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.floats(0, 3), st.sampled_from(RULES), st.floats(0.3, 2.0))
def test_no_drift_on_any_support(seed, kept, noise, rule, temperature):
    z, log_q = softmax_pair(seed, 12, noise)
    support = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:kept]
    log_q = torch.log_softmax(log_q[support], 0)
    losses = lambda rows: token_losses(  # noqa: E731
        rows,
        support,
        log_q,
        torch.ones(kept, dtype=F64),
        rule=rule,
        centering=True,
        temperature=temperature,
        support_offsets=torch.arange(kept + 1) * kept,
        support_ids=support.repeat(kept),
        support_log_q=log_q.repeat(kept),
    )
    assert expected_gradient(z, log_q.exp(), losses).abs().max() < 1e-12
    rows = z.expand(kept, -1).clone().requires_grad_()
    losses(rows).sum().backward()
    off = torch.ones(12, dtype=torch.bool)
    off[support] = False
    assert rows.grad[:, off].eq(0).all()
    if kept == 1:
        assert rows.grad.eq(0).all() and losses(rows).eq(0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 11), st.sampled_from(RULES))
def test_no_drift_when_the_tail_is_proportional(seed, k, rule):
    """Off the head q = rho p: the model of the tail is then the truth, and a head of any size is exact."""
    z, log_q = softmax_pair(seed, 12, 1.0)
    head = log_q.argsort(descending=True)[:k]
    tail = torch.ones(12, dtype=torch.bool)
    tail[head] = False
    log_p = torch.log_softmax(z, 0)
    log_q[tail] = log_p[tail] - log_p[tail].logsumexp(0) + log_q[tail].logsumexp(0)
    drift = expected_gradient(
        z,
        log_q.exp(),
        lambda rows: token_losses(
            rows,
            torch.arange(12),
            log_q,
            torch.ones(12, dtype=F64),
            rule=rule,
            centering=True,
            head_ids=head.expand(12, -1),
            head_log_q=log_q[head].expand(12, -1),
        ),
    )
    assert drift.abs().max() < 1e-12


def test_only_the_reward_is_left():
    """E_q[g] = -Cov_q(A, s): with advantages that vary by token, what remains is the signal."""
    z, log_q = softmax_pair(3, 8, 1.0)
    q, p = log_q.exp(), torch.softmax(z, 0)
    advantages = torch.linspace(-1, 1, 8, dtype=F64)
    drift = expected_gradient(
        z,
        q,
        lambda rows: token_losses(
            rows,
            torch.arange(8),
            log_q,
            advantages,
            rule=Rule("none"),
            centering=True,
            head_ids=torch.arange(8).expand(8, -1),
            head_log_q=log_q.expand(8, -1),
        ),
    )
    score = torch.eye(8, dtype=F64) - p
    covariance = (q[:, None] * (advantages - (q * advantages).sum())[:, None] * score).sum(0)
    assert (drift + covariance).abs().max() < 1e-14


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(RULES))
def test_order_of_the_head_is_irrelevant(seed, rule):
    z, log_q = softmax_pair(seed, 10, 1.0)
    head = log_q.argsort(descending=True)[:4]
    shuffled = head[torch.randperm(4, generator=torch.Generator().manual_seed(seed))]
    grads = []
    for ids in (head, shuffled, torch.cat((torch.tensor([-1]), head))):
        row = z.clone()[None].requires_grad_()
        row_log_q = torch.where(ids >= 0, log_q[ids], -math.inf)
        token_losses(
            row,
            torch.tensor([2]),
            log_q[[2]],
            torch.ones(1, dtype=F64),
            rule=rule,
            centering=True,
            head_ids=ids[None],
            head_log_q=row_log_q[None],
        ).sum().backward()
        grads.append(row.grad)
    assert (grads[0] - grads[1]).abs().max() < 1e-14
    assert (grads[0] - grads[2]).abs().max() < 1e-14


def test_inactive_rows_may_hold_anything():
    z, log_q = softmax_pair(0, 6, 0.5)
    logits = torch.stack([z, z * math.nan]).requires_grad_()
    head = torch.tensor([[0, 1], [-7, 99]])
    losses = token_losses(
        logits,
        torch.tensor([1, 4]),
        torch.tensor([log_q[1], math.nan], dtype=F64),
        torch.tensor([2.0, math.nan], dtype=F64),
        rule=Rule("mis", 0.5, 5.0),
        centering=True,
        head_ids=head,
        head_log_q=torch.tensor([[log_q[0], log_q[1]], [math.nan, math.inf]], dtype=F64),
        active=torch.tensor([True, False]),
    )
    losses.sum().backward()
    assert losses[1] == 0 and logits.grad[1].eq(0).all()
    assert losses[0] != 0 and logits.grad[0].isfinite().all()


def test_bounds_per_row():
    z, log_q = softmax_pair(1, 6, 1.0)
    ratio = (torch.log_softmax(z, 0) - log_q).exp()
    y = int(ratio.argmax())
    rule = Rule("mis", torch.tensor([0.5, 0.5]), torch.tensor([float(ratio[y]) * 1.1, float(ratio[y]) * 0.9]))
    logits = z.expand(2, -1).clone().requires_grad_()
    losses = token_losses(
        logits, torch.tensor([y, y]), log_q[[y, y]], torch.ones(2, dtype=F64), rule=rule, centering=False
    )
    assert losses[0] != 0 and losses[1] == 0


def test_an_underflowing_sampler_probability_stays_finite():
    """q = exp(-200) is zero in fp32; no rule forms p / q from it."""
    log_p, log_q = torch.tensor([-1.0]), torch.tensor([-200.0])
    assert Rule("mis", 0.5, 5.0).weight(log_p, log_q) == 0 == Rule("mis", 0.5, 5.0).mass(log_p, log_q)
    assert Rule("tis", 0.0, 2.0).weight(log_p, log_q) == pytest.approx(2.0)
    assert Rule("tis", 0.0, 2.0).mass(log_p, log_q) == 0
    assert Rule("is").mass(log_p, log_q) == pytest.approx(math.exp(-1))


@pytest.mark.parametrize("bounds", [(2.0, 0.5), (-0.1, 2.0), (0.5, math.inf), (1.0, 1.0)])
def test_bounds_out_of_range(bounds):
    with pytest.raises(ContractError, match="bounds"):
        Rule("mis", *bounds)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_temperature_out_of_range(temperature):
    one = torch.zeros(1, dtype=torch.long)
    own = one.float() - 1
    with pytest.raises(ContractError, match="temperature"):
        token_losses(torch.zeros(1, 4), one, own, own, rule=Rule(), centering=False, temperature=temperature)


@pytest.mark.parametrize("short", ["sampled_log_q", "advantages", "head_log_q", "active"])
def test_shapes_must_fit(short):
    columns = {
        "sampled_ids": torch.tensor([0, 1]),
        "sampled_log_q": torch.full((2,), -1.0),
        "advantages": torch.ones(2),
        "active": torch.ones(2, dtype=torch.bool),
        "head_ids": torch.tensor([[0], [1]]),
        "head_log_q": torch.full((2, 1), -1.0),
    }
    columns[short] = columns[short][:1]
    with pytest.raises(ContractError, match="2 rows of logits"):
        token_losses(torch.zeros(2, 4), rule=Rule(), centering=True, **columns)


def test_an_unbounded_ratio_stays_finite():
    assert Rule("is").weight(torch.tensor([-1.0]), torch.tensor([-200.0])).isfinite()


def test_published_floors():
    """With a floor both tails are floored, as published code does: alpha = q_T / 1e-6 for a trainer tail of 1e-8."""
    p = torch.tensor([0.6, 0.4 - 1e-8, 1e-8], dtype=F64)
    log_q = torch.tensor([0.5, 0.3], dtype=F64).log()
    grads = []
    for floor in (None, 1e-6):
        z = p.log()[None].requires_grad_()
        token_losses(
            z,
            torch.tensor([0]),
            log_q[[0]],
            torch.ones(1, dtype=F64),
            rule=Rule(),
            centering=True,
            head_ids=torch.tensor([[0, 1]]),
            head_log_q=log_q[None],
            tail_floor=floor,
        ).sum().backward()
        grads.append(z.grad[0])
    exact, floored = 0.2, 0.2 / 1e-6 * 1e-8
    for grad, tail in zip(grads, (exact, floored), strict=True):
        total = 0.8 + tail
        centre = torch.tensor([0.5, 0.3, tail], dtype=F64) - p * total
        expected = -(torch.tensor([1.0, 0, 0], dtype=F64) - p - centre)
        assert (grad - expected).abs().max() < 1e-12
