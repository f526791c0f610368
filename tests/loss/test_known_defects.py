"""Defects found in public implementations, each with the input that showed it and the right value."""

import json
import math
from pathlib import Path

import pytest
import torch

from miles_mixprec.errors import ConfigError, ContractError
from miles_mixprec.loss.estimator import Estimate, Rule, token_losses
from miles_mixprec.loss.metrics import sums, token_pairs
from miles_mixprec.loss.vocab import Shard, score_head, score_support

REDUCTIONS = json.loads((Path(__file__).parent / "golden/loss_golden.json").read_text())["reductions"]
RULES = [Rule("none"), Rule("is"), Rule("tis", 0.0, 2.0), Rule("mis", 0.5, 5.0)]


def on_support(logits, ids, q, y, own=None):
    """Loss of one token whose recorded support is `ids` with probabilities `q`."""
    log_q = torch.tensor(q, dtype=torch.float64).log()
    own = log_q[ids.index(y)] if own is None else own
    return token_losses(
        logits[None],
        torch.tensor([y]),
        torch.tensor([float(own)], dtype=torch.float64),
        torch.ones(1, dtype=torch.float64),
        rule=Rule(),
        centering=False,
        support_offsets=torch.tensor([0, len(ids)]),
        support_ids=torch.tensor(ids),
        support_log_q=log_q,
    )


def reported(rule, log_ratio):
    """The metrics of tokens with these log ratios."""
    log_q = torch.full((len(log_ratio),), -1.0, dtype=torch.float64)
    log_p = log_q + torch.tensor(log_ratio, dtype=torch.float64)
    zero = torch.zeros_like(log_q)
    estimate = Estimate(zero, log_p, log_q, rule.weight(log_p, log_q), *([zero] * 6))
    every = {"all": torch.ones(len(log_ratio), dtype=torch.bool)}
    found = sums(token_pairs(estimate, rule, zero), every)
    return {
        name: float(found[f"mixprec/all/{name}_num"] / found[f"mixprec/all/{name}_den"])
        for name in ("ratio", "weight")
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_masked_token_with_an_infinite_ratio(rule, advantage):
    """prime-rl #2084, #2085: trainer -1, sampler -100 on a masked token gave 0 * inf = NaN for the whole run."""
    logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    losses = token_losses(
        logits,
        torch.tensor([0, 0]),
        torch.tensor([-100.0, -1.1]),
        torch.full((2,), advantage),
        rule=rule,
        centering=False,
        active=torch.tensor([0, 1]),
    )
    losses.sum().backward()
    assert losses[0] == 0 and logits.grad[0].eq(0).all()
    assert losses.isfinite().all() and logits.grad.isfinite().all() and logits.grad[1].abs().sum() > 0


def test_truncated_support_with_untruncated_log_probs():
    """sglang #34037: S = .4 .3 .2 .1 cut to two ids, log q still of the four: refused, not repaired."""
    with pytest.raises(ContractError, match=r"support mass is 0\.7, not 1.*\[support_mass\]"):
        on_support(torch.zeros(4), [0, 1], [0.4, 0.3], 1)


def test_support_rebuilt_after_sampling():
    """sglang #36630, #35966: sampled from {0, 1, 2}, recorded as {0, 1}: log q is off by .172 nats, r by 1.1875."""
    true, rebuilt = math.log(0.3 / 0.95), math.log(0.3 / 0.8)
    assert (true, rebuilt) == (pytest.approx(-1.153, abs=1e-3), pytest.approx(-0.981, abs=1e-3))
    with pytest.raises(ContractError, match=r"differ by 0\.172 nats"):
        on_support(torch.zeros(4), [0, 1], [0.5 / 0.8, 0.3 / 0.8], 1, own=true)


def test_support_wider_than_top_k_through_ties():
    """sglang #36631: 65 tokens tie at top_k 64; all of them count."""
    logits = torch.zeros(80, dtype=torch.float64)
    assert on_support(logits, list(range(65)), [1 / 65] * 65, 64).item() == pytest.approx(math.log(65))


def test_unbounded_top_p_is_refused_by_the_configuration():
    """sglang #35205: top_p .95 without top_k records 95,000 ids for one token of a flat distribution."""
    import rig

    from miles_mixprec.config import from_mapping

    with pytest.raises(ConfigError, match=r"finite algo\.top_k"):
        from_mapping(rig.mixprec("sc_mis_top_p", top_p=0.95, top_k=-1))


def test_the_trainer_replays_the_support_and_never_recomputes_it():
    """prime-rl #2601, sglang-jax #1563: at a top-p boundary the trainer's own filter loses token 2 and says -inf."""
    logits = torch.tensor([0.5, 0.2, 0.199, 0.101], dtype=torch.float64).log()
    recorded = [0, 1, 2]
    loss = on_support(logits, recorded, [0.5 / 0.9, 0.2 / 0.9, 0.2 / 0.9], 2)
    assert loss.item() == pytest.approx(-math.log(0.199 / 0.899))


def test_disallowed_tokens_leave_the_normalisation():
    """sglang #38279: 50/30/20 with id 2 disallowed is .625/.375; ids that the sampler cannot draw count for nobody."""
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    log_p = score_support(logits, torch.tensor([0, 2]), torch.tensor([0, 1]), shard=Shard(3))
    assert log_p.tolist() == [pytest.approx(-0.470, abs=1e-3), pytest.approx(-0.981, abs=1e-3)]
    unmapped = torch.cat((logits, torch.full((1, 243), 9.0)), dim=1)
    y = torch.tensor([0])
    scores = score_head(unmapped, y, y[:, None][:, :0], shard=Shard(3))
    assert scores.sampled.item() == pytest.approx(math.log(0.5))


def test_log_probs_are_of_the_sampling_temperature():
    """miles #1345, vime #64: logits 0 and 1 at T = .7; scored at T = 1 the ratio is a false 1.103."""
    y = torch.tensor([1])
    logits = torch.tensor([[0.0, 1.0]])
    scored = [
        score_head(logits, y, y[:, None][:, :0], shard=Shard(2), temperature=t).sampled.item() for t in (0.7, 1.0)
    ]
    assert scored == [pytest.approx(-0.2148, abs=1e-4), pytest.approx(-0.3133, abs=1e-4)]
    assert math.exp(scored[0] - scored[1]) == pytest.approx(1.103, abs=1e-3)


def test_ratios_are_reported_before_truncation():
    """NeMo-RL #3900: three ratios with mean 4.536 were reported as 2.142 under TIS and .475 under IcePop."""
    log_ratio = [math.log(r) for r in (0.606531, 12.182494, 0.818731)]
    tis, mis = reported(Rule("tis", 0.0, 5.0), log_ratio), reported(Rule("mis", 0.5, 5.0), log_ratio)
    assert tis["ratio"] == mis["ratio"] == pytest.approx(4.535918, abs=1e-5)
    assert (tis["weight"], mis["weight"]) == (pytest.approx(2.141754, abs=1e-5), pytest.approx(0.475087, abs=1e-5))


def test_a_rejected_token_stays_in_the_denominator():
    """slime #657, arcee-ai/NeMo-RL #24: weight 0 keeps the token in the mean; 0.5 for ratios 1 and 9, never 1 or 5."""
    assert reported(Rule("mis", 0.5, 2.0), [0.0, math.log(9)])["weight"] == pytest.approx(0.5)
    case = REDUCTIONS["mis_denominators"]
    weight = reported(Rule("mis", *case["band"]), case["log_ratio"])["weight"]
    assert weight == pytest.approx(case["weight_zero_keep_denominator"], abs=1e-7)


def test_token_means_leave_out_observations():
    """slime #364: eight tokens of ratio 1, five of them from a tool: the mean is 1, not .375."""
    import rig
    from test_policy_loss import mean, run

    data = rig.make_data(totals=(20,), responses=(8,), noise=0.0)
    data.masks[0] = torch.tensor([1, 1, 0, 0, 0, 0, 0, 1])
    data.log_q[0] = data.log_q[0].nan_to_num(-100.0)
    _, _, report = run("grpo", data)
    assert float(report["mixprec/all/ratio_den"]) == 3
    assert mean(report, "all", "ratio") == pytest.approx(1.0, abs=1e-4)


def test_metrics_need_no_bounds():
    """slime #2349: mismatch metrics of an arm without bounds read the unset ones first."""
    assert reported(Rule("none"), [0.0, 1.0])["weight"] == 1.0


def test_token_mean_and_sample_mean():
    """Two samples of 2 and 6 tokens: which mean is meant changes the loss; the reducer is Miles' own."""
    pytest.importorskip("miles")
    import rig

    case = REDUCTIONS["token_vs_sample_mean"]
    batch = {
        "total_lengths": [4, 8],
        "response_lengths": [2, 6],
        "loss_masks": [torch.ones(2), torch.ones(6)],
        "max_seq_lens": None,
    }
    rig.set_parallel()
    values = torch.tensor(case["sample1"] + case["sample2"])
    for token_mean, count in ((True, 8), (False, 2)):
        args = rig.miles_args(rig.mixprec("sc", token_mean=token_mean))
        expected = case["token_mean" if token_mean else "sample_mean"]
        assert float(rig.reducer(args, batch)(values)) / count == pytest.approx(expected)
