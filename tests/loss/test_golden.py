"""Float64 golden cases, worked out from the mathematics alone, against the public function."""

import json
import math
from pathlib import Path

import pytest
import torch

from miles_mixprec.errors import ContractError
from miles_mixprec.loss.estimator import Rule, token_losses

GOLDEN = json.loads((Path(__file__).parent / "golden/loss_golden.json").read_text())
CASES = [(case, method) for case in GOLDEN["cases"] for method in GOLDEN["cases"][case]["methods"]]


def rule_of(method):
    return Rule(method["mode"], method["bounds"].get("low", 0.0), method["bounds"].get("high", math.inf))


def losses_of(case, centering, rule, dtype, **over):
    """The golden case as one row. Log-probs that the sampler cannot have (None) are absent from its sets."""
    case = {**case, **over}
    z = torch.tensor([case["z"]], dtype=dtype, requires_grad=True)
    log_q = [-math.inf if x is None else x for x in case["logq"]]
    if case["support_ids"] is not None:
        ids = case["support_ids"]
        sets = {
            "support_offsets": torch.tensor([0, len(ids)]),
            "support_ids": torch.tensor(ids, dtype=torch.int32),
            "support_log_q": torch.tensor([log_q[i] for i in ids], dtype=dtype),
        }
    else:
        ids = case.get("head_ids_padded", case["head_ids"])
        head = [log_q[i] if i >= 0 else -math.inf for i in ids]
        sets = {
            "head_ids": torch.tensor([ids], dtype=torch.int32),
            "head_log_q": torch.tensor([head], dtype=dtype),
        }
    losses = token_losses(
        z,
        torch.tensor([case["y"]]),
        torch.tensor([log_q[case["y"]]], dtype=dtype),
        torch.tensor([case["A"]], dtype=dtype),
        rule=rule,
        centering=centering,
        temperature=case["T"],
        **sets,
    )
    losses.sum().backward()
    return losses.detach(), z.grad[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("case", "method"), CASES)
def test_gradient_and_value(case, method, dtype, tolerance):
    case = GOLDEN["cases"][case]
    golden = case["methods"][method]
    loss, grad = losses_of(case, method.startswith("SC"), rule_of(golden), dtype)
    assert (grad.double() - torch.tensor(golden["grad_z"], dtype=torch.float64)).abs().max() <= tolerance
    if case["loss_comparable"]:
        scale = max(1.0, abs(golden["loss"]))
        # In fp32 the published value itself is 1 - sum p away from the exact one; its gradient is not.
        assert abs(float(loss) - golden["loss"]) <= (1e-10 if dtype == torch.float64 else 2e-6) * scale


@pytest.mark.parametrize("row", GOLDEN["fp32_numerics"], ids=lambda r: f"p{r['p_tail']:g}-q{r['q_tail']:g}")
def test_thin_tails_do_not_cancel(row):
    """fp32 against the exact gradient in float64 where the trainer or the sampler has nearly nothing off the head."""
    p_tail, q_tail = row["p_tail"], row["q_tail"]
    k, tail = 16, 48
    generator = torch.Generator().manual_seed(0)
    head = torch.rand(2, k, generator=generator, dtype=torch.float64) + 0.1
    off = torch.rand(tail, generator=generator, dtype=torch.float64) + 0.1
    p = torch.cat((head[0] / head[0].sum() * (1 - p_tail), off / off.sum() * p_tail))
    q_head = head[1] / head[1].sum() * (1 - q_tail)
    z = p.log().float()[None].requires_grad_()
    p = torch.softmax(z.detach().double()[0], 0)
    losses = token_losses(
        z,
        torch.tensor([3]),
        q_head[3].log().float()[None],
        torch.ones(1),
        rule=Rule("none"),
        centering=True,
        head_ids=torch.arange(k)[None],
        head_log_q=q_head.log().float()[None],
    )
    losses.sum().backward()
    expected = torch.cat((q_head, q_tail * p[k:] / p[k:].sum()))
    expected[3] -= 1
    assert (z.grad[0].double() - expected).abs().sum() <= 1e-6


def drift(losses):
    """E_q[g] at A = 1 over all six tokens of the mutants' input, from a function y -> loss(z)."""
    q = GOLDEN["mutants_input"]["q"]
    total = torch.zeros(6, dtype=torch.float64)
    for y in range(6):
        z = torch.tensor(GOLDEN["mutants_input"]["p"], dtype=torch.float64).log().requires_grad_()
        losses(z, y).sum().backward()
        total += q[y] * z.grad
    return total


def ours(z, y):
    low, high = GOLDEN["mutants_input"]["band"]
    log_q = torch.tensor(GOLDEN["mutants_input"]["q"], dtype=torch.float64).log()
    return token_losses(
        z[None],
        torch.tensor([y]),
        log_q[[y]],
        torch.ones(1, dtype=torch.float64),
        rule=Rule("mis", low, high),
        centering=True,
        head_ids=torch.arange(6)[None],
        head_log_q=log_q[None],
    )


def mutant(name):
    p, q = (torch.tensor(GOLDEN["mutants_input"][key], dtype=torch.float64) for key in "pq")
    low, high = GOLDEN["mutants_input"]["band"]
    inside = (p / q >= low) & (p / q <= high)
    w = torch.where(inside, p / q, 0.0)

    def losses(z, y):
        score = torch.log_softmax(z, 0)
        centre = {
            "unweighted_centre_with_MIS_sample": (q * score).sum(),
            "centre_dropped_when_sample_masked": (q * w * score).sum() * bool(w[y] > 0),
            "centre_multiplied_by_w_y": w[y] * (q * w * score).sum(),
            "centre_sign_flipped": -(q * w * score).sum(),
            "centre_uses_p_instead_of_q": (p * w * score).sum(),
        }[name]
        return -(w[y] * score[y] - centre)

    return losses


def test_no_drift():
    assert drift(ours).abs().max() <= 1e-15


@pytest.mark.parametrize("name", [n for n in GOLDEN["mutants"] if n != "correct" and not n.startswith("PPO")])
def test_mutants_drift(name):
    """The check above has teeth: each published mistake pushes the logits by what the golden file says."""
    expected = torch.tensor(GOLDEN["mutants"][name]["drift"], dtype=torch.float64)
    assert (-drift(mutant(name)) - expected).abs().max() <= 1e-12
    assert expected.abs().max() > 1e-2


def test_band_is_decided_once_per_id():
    """log q of the sampled token differs in the last digit from its head row, on either side of a bound."""
    edge = GOLDEN["edge_disagreement"]
    p, q = (torch.tensor(edge[key], dtype=torch.float64) for key in "pq")
    total = torch.zeros(3, dtype=torch.float64)
    for y in range(3):
        z = p.log().requires_grad_()
        log_q = q.log()
        token_losses(
            z[None],
            torch.tensor([y]),
            log_q[[y]] - 1e-4,  # p/q = 5.0005, outside [0.5, 5], were it believed
            torch.ones(1, dtype=torch.float64),
            rule=Rule("mis", *edge["band"]),
            centering=True,
            head_ids=torch.arange(3)[None],
            head_log_q=log_q[None],
        ).sum().backward()
        total += q[y] * z.grad
    assert total.abs().max() <= 1e-15


@pytest.mark.parametrize("bad", GOLDEN["must_raise"], ids=lambda bad: bad["id"])
def test_must_raise(bad):
    logits = torch.zeros(1, 6, dtype=torch.float64)
    head = bad.get("head_ids", [0, 1])
    log_q = [math.nan if x is None else x for x in bad.get("head_logq", bad.get("logq", [-2.0] * len(head)))]
    y = bad.get("y", head[0])
    if "support" in bad:
        n = len(bad["support"])
        log_q = log_q if "logq" in bad else [-math.log(n)] * n
        sets = {
            "support_offsets": torch.tensor([0, n]),
            "support_ids": torch.tensor(bad["support"]),
            "support_log_q": torch.tensor(log_q, dtype=torch.float64),
        }
    else:
        sets = {"head_ids": torch.tensor([head]), "head_log_q": torch.tensor([log_q], dtype=torch.float64)}
    own = log_q[0] if math.isfinite(log_q[0]) else -1.0
    with pytest.raises(ContractError, match=r"row 0: .*\["):
        token_losses(
            logits,
            torch.tensor([y]),
            torch.tensor([own], dtype=torch.float64),
            torch.ones(1, dtype=torch.float64),
            rule=Rule("mis", 0.5, 5.0),
            centering=True,
            **sets,
        )
