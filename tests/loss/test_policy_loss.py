import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rig
import torch
import torch.distributed as dist

from miles_mixprec import miles
from miles_mixprec.errors import ConfigError, ContractError
from miles_mixprec.loss.estimator import Rule, token_losses
from miles_mixprec.rollout.record import Source, Support

pytestmark = pytest.mark.miles
ROOT = Path(__file__).parents[2]
SGLANG_FOR_V01 = Path(sys.prefix) / "sglang-0.5.16"
THD = ("thd", False)


def run(arm, data=None, algo=None, layout=THD, **flags):
    """(loss, gradient, metrics) of one process."""
    data = data or rig.make_data(support=arm.endswith("top_p"))
    rig.set_parallel()
    args = rig.miles_args(rig.mixprec(arm, **(algo or {})), qkv_format=layout[0], **flags)
    return rig.run_loss(args, rig.local_batch(data, layout, (0, 1)), rig.local_logits(data, layout, (0, 1), (0, 1)))


def active_rows(data):
    """(sample, response position, row of the packed logits) of each token that counts."""
    starts = np.concatenate(([0], np.cumsum(data.totals)))
    return [
        (i, r, int(starts[i]) + data.totals[i] - data.responses[i] - 1 + r)
        for i in range(len(data.totals))
        for r in range(data.responses[i])
        if data.masks[i][r]
    ]


def mean(report, group, metric):
    return float(report[f"mixprec/{group}/{metric}_num"] / report[f"mixprec/{group}/{metric}_den"])


@pytest.mark.parametrize("arm", list(rig.ARMS))
def test_is_the_estimator_on_active_tokens(arm):
    data = rig.make_data(support=arm.endswith("top_p"))
    loss, grad, _ = run(arm, data)
    algo = rig.mixprec(arm)["algo"]
    tokens = active_rows(data)
    logits = torch.cat(data.logits)[:, : rig.VOCAB].clone().requires_grad_()
    sets = {}
    if "top_p" in algo:
        rows = [slice(data.supports[i].offsets[r], data.supports[i].offsets[r + 1]) for i, r, _ in tokens]
        sizes = [row.stop - row.start for row in rows]
        sets = {
            "support_offsets": torch.tensor([0, *np.cumsum(sizes).tolist()]),
            "support_ids": torch.cat(
                [torch.from_numpy(data.supports[i].ids[row]) for (i, _, _), row in zip(tokens, rows, strict=True)]
            ),
            "support_log_q": torch.cat(
                [
                    torch.from_numpy(data.supports[i].log_probs[row])
                    for (i, _, _), row in zip(tokens, rows, strict=True)
                ]
            ),
        }
    elif algo.get("score_centering"):
        sets = {
            "head_ids": torch.stack([torch.from_numpy(data.head_ids[i][r]) for i, r, _ in tokens]),
            "head_log_q": torch.stack([torch.from_numpy(data.head_log_q[i][r]) for i, r, _ in tokens]),
        }
    expected = token_losses(
        logits[[row for _, _, row in tokens]],
        torch.stack([data.tokens[i][data.totals[i] - data.responses[i] + r] for i, r, _ in tokens]),
        torch.stack([data.log_q[i][r] for i, r, _ in tokens]),
        torch.stack([data.advantages[i][r] for i, r, _ in tokens]),
        rule=Rule(algo.get("weights", "none"), *algo.get("bounds", [0.5, 5.0])),
        centering=algo.get("score_centering", False),
        temperature=rig.TEMPERATURE,
        **sets,
    ).sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    grad = grad[0, : logits.size(0)]
    assert (grad[:, : rig.VOCAB] - logits.grad).abs().max() < 1e-6 and grad[:, rig.VOCAB :].eq(0).all()
    assert grad.abs().sum(1).gt(0).sum() <= len(tokens)


def test_layouts_agree():
    flat = run("sc_mis")
    padded = run("sc_mis", layout=("bshd", False))
    assert torch.equal(flat[0], padded[0])
    assert all(torch.equal(flat[2][key], padded[2][key]) for key in flat[2])


@pytest.fixture(scope="module")
def grids():
    """What four gloo processes found: loss, every metric and each rank's gradient against one process, per grid."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, rig.__file__], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("tp", "cp"), rig.GRIDS)
def test_parallel_ranks_equal_one_process(grids, tp, cp):
    """Zigzag and all-gather CP, thd and bshd, TP; a bad token that only one CP rank sees rejects its sample on all."""
    found = [result for result in grids if result["grid"] == [tp, cp]]
    assert len(found) == (12 if cp > 1 else 8)
    for result in found:
        assert result["same_keys"], result
        assert result["grad"] <= 1e-6 * max(1, result["size"]) and result["sums"] <= 2e-6, result
        assert result["size"] > 0.01, result


@pytest.mark.parametrize("recompute", [False, True])
def test_miles_dispatcher(recompute):
    """Miles' own loss_function finds the hook by its path, scales its loss and stacks its metrics."""
    data = rig.make_data()
    rig.set_parallel()
    args = rig.miles_args(rig.mixprec("sc_mis"), recompute_loss_function=recompute)
    batch, logits = rig.local_batch(data, THD, (0, 1)), rig.local_logits(data, THD, (0, 1), (0, 1))
    loss, normaliser, keys, values, grad = rig.dispatch(args, batch, logits)
    expected_loss, expected_grad, report = rig.run_loss(args, batch, logits)
    assert torch.equal(loss, expected_loss) and torch.equal(grad, expected_grad)
    assert keys == list(report)
    assert torch.equal(values[1:], torch.stack(list(report.values())))
    # Miles counts at least one token for the sample without a response.
    assert int(normaliser) == int(values[0]) == sum(max(1, int(mask.sum())) for mask in data.masks)


def test_miles_v01_dispatcher():
    source = os.environ.get("MILES_SOURCE")
    if not source:
        pytest.skip("set MILES_SOURCE to a checkout of Miles v0.1")
    if not SGLANG_FOR_V01.exists():
        pytest.skip(
            f"Miles v0.1 imports sglang 0.5.16: pip install --no-deps --target {SGLANG_FOR_V01} sglang==0.5.16"
        )
    path = os.pathsep.join([source, str(SGLANG_FOR_V01), str(ROOT), str(Path(__file__).parent)])
    script = (
        "import json, rig, torch\n"
        "found = {}\n"
        "for arm in rig.ARMS:\n"
        "    data = rig.make_data(support=arm.endswith('top_p'))\n"
        "    rig.set_parallel()\n"
        "    args = rig.miles_args(rig.mixprec(arm))\n"
        "    batch = rig.local_batch(data, ('thd', False), (0, 1))\n"
        "    logits = rig.local_logits(data, ('thd', False), (0, 1), (0, 1))\n"
        "    loss, n, keys, values, grad = rig.dispatch(args, batch, logits)\n"
        "    found[arm] = [float(loss), int(n), len(keys), float(grad.double().square().sum())]\n"
        "import miles.backends.training_utils.loss_hub\n"
        "print(json.dumps(found))\n"
    )
    env = {**os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for arm, (loss, count, keys, square) in found.items():
        expected_loss, expected_grad, report = run(arm)
        assert (loss, keys, count) == (pytest.approx(float(expected_loss)), len(report), 23)
        assert square == pytest.approx(float(expected_grad.double().square().sum()))


@pytest.fixture
def one_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_stock_tis_hook_is_the_mis_arm(one_process_group):
    """Miles' own icepop through --use-tis has the gradient of algo=mis while its old log-probs are current."""
    from miles.backends.training_utils.loss import get_log_probs_and_entropy, icepop_function, policy_loss_function

    data = rig.make_data(responses=(7, 3, 11, 10))
    for x in data.logits:
        x[:, rig.VOCAB :] = -1e4  # Miles 0.0.2 counts padding columns in its log-probs
    rig.set_parallel(tp=(0, 1, dist.group.WORLD))
    args = rig.miles_args(
        rig.mixprec("mis"),
        **{"use_rollout_logprobs": False, "use_tis": True, "tis_clip_low": 0.5, "tis_clip": 5.0},
        **{"custom_tis_function_path": f"{icepop_function.__module__}.icepop_function", "get_mismatch_metrics": False},
        **{"eps_clip": 0.2, "eps_clip_high": 0.28, "vocab_size": rig.VOCAB},
    )
    batch = rig.local_batch(data, THD, (0, 1))
    batch["rollout_log_probs"] = [x.nan_to_num(-1.0) for x in batch["rollout_log_probs"]]
    logits = rig.local_logits(data, THD, (0, 1), (0, 1))
    parts = {key: batch[key] for key in ("unconcat_tokens", "total_lengths", "response_lengths")}
    scored = get_log_probs_and_entropy(logits.clone(), args=args, **parts)
    scored = scored[1] if isinstance(scored, tuple) else scored
    batch["log_probs"] = [x.detach() for x in scored["log_probs"]]
    stock = logits.clone().requires_grad_()
    policy_loss_function(args, batch, stock, rig.reducer(args, batch))[0].backward()
    _, grad, _ = run("mis", data)
    # Megatron's fused cross-entropy rounds its gradient to bf16.
    assert (stock.grad - grad).abs().max() < 4e-3 * grad.abs().max()


@pytest.mark.parametrize("arm", ["sc_mis", "sc_mis_top_p", "grpo"])
def test_nothing_active(arm):
    """All tokens masked, or no response at all: zero loss, a gradient that reaches the logits, the usual keys."""
    data = rig.make_data(support=arm.endswith("top_p"))
    keys = list(run(arm, data)[2])
    masked = dataclasses.replace(data, masks=[mask * 0 for mask in data.masks])
    empty = rig.make_data(totals=(5, 8), responses=(0, 0), support=arm.endswith("top_p"))
    for case in (masked, empty):
        case.logits[0] = case.logits[0] * torch.nan
        loss, grad, report = run(arm, case)
        assert loss == 0 and grad is not None and grad.eq(0).all()
        assert list(report) == keys and report["mixprec/all/kl_den"] == 0


def test_split_of_the_batch_changes_nothing():
    """One micro-batch, or one per sample: gradients and every sum add up."""
    data = rig.make_data(responses=(7, 3, 11, 10))
    whole_loss, whole_grad, whole = run("sc_mis", data)
    fields = [field.name for field in dataclasses.fields(data)]
    parts = [
        run("sc_mis", rig.Data(**{name: getattr(data, name)[i : i + 1] for name in fields}))
        for i in range(len(data.totals))
    ]
    assert sum(part[0] for part in parts).item() == pytest.approx(whole_loss.item(), rel=1e-5)
    rows = torch.cat([part[1][0, :total] for part, total in zip(parts, data.totals, strict=True)])
    assert (rows - whole_grad[0, : rows.size(0)]).abs().max() < 1e-6
    for key, value in whole.items():
        assert sum(float(part[2][key]) for part in parts) == pytest.approx(float(value), rel=1e-5, abs=1e-5), key


def test_metrics_are_means_over_their_groups():
    data = rig.make_data(responses=(7, 3, 11, 10))
    miles.set_trainer_version(8)
    try:
        _, _, report = run("sc_mis", data, {"bounds_by_view": {"fp8": [0.9, 1.1]}})
    finally:
        miles.set_trainer_version(0)
    log_p = torch.log_softmax(torch.cat(data.logits)[:, : rig.VOCAB].double() / rig.TEMPERATURE, -1)
    rows = []
    for i, r, row in active_rows(data):
        y = int(data.tokens[i][data.totals[i] - data.responses[i] + r])
        p, q = log_p[row].exp(), np.exp(data.head_log_q[i][r].astype(np.float64))
        p_head, d = p[data.head_ids[i][r].astype(np.int64)].numpy(), float(log_p[row, y]) - float(data.log_q[i][r])
        low, high = (0.9, 1.1) if i % 2 else (0.5, 5.0)
        rows.append(
            {
                "pool": "ab"[i % 2],
                "kl": np.exp(d) - 1 - d,
                "log_ratio": abs(d),
                "ratio": np.exp(d),
                "ratio_tail": abs(d) > np.log(5),
                "masked": not low <= np.exp(d) <= high,
                "weight": np.exp(d) * (low <= np.exp(d) <= high),
                "sampler_mass": q.sum(),
                "trainer_mass": p_head.sum(),
                "drift": abs(p_head - q).sum() + abs(p_head.sum() - q.sum()),
                "entropy": -float((p * log_p[row]).sum()),
                "lag": 8 - r % 9,
            }
        )
    for group, member in (("all", "ab"), ("pool/a", "a"), ("pool/b", "b"), ("view/bf16", "a"), ("view/fp8", "b")):
        mine = [row for row in rows if row["pool"] in member]
        for metric in rows[0].keys() - {"pool"}:
            assert mean(report, group, metric) == pytest.approx(np.mean([row[metric] for row in mine]), rel=1e-4), (
                metric
            )
        ratio = sum(1 - row["sampler_mass"] for row in mine) / sum(1 - row["trainer_mass"] for row in mine)
        assert mean(report, group, "tail_ratio") == pytest.approx(ratio, rel=1e-4)
        assert mean(report, group, "weight_sq") == pytest.approx(
            np.mean([row["weight"] ** 2 for row in mine]), rel=1e-4
        )
    for name, (low, high) in {"0-1": (0, 1), "2-3": (2, 3), "4-5": (4, 5), "6+": (6, 99)}.items():
        mine = [row["kl"] for row in rows if low <= row["lag"] <= high]
        assert float(report[f"mixprec/lag/{name}/kl_den"]) == len(mine) > 0
        assert mean(report, f"lag/{name}", "kl") == pytest.approx(np.mean(mine), rel=1e-4)


def test_a_support_has_mass_one_on_both_sides():
    _, _, report = run("sc_mis_top_p")
    assert mean(report, "all", "sampler_mass") == pytest.approx(1, abs=1e-5)
    assert mean(report, "all", "trainer_mass") == pytest.approx(1, abs=1e-5)


def damaged(arm, change):
    data = rig.make_data(responses=(7, 3, 11, 10), support=arm.endswith("top_p"))
    change(data)
    return data


def set_at(x, index, value):
    x[index] = value


SUPPORT = "sc_mis_top_p"
REJECTED = {
    "duplicate in the head": ("sc_mis", lambda d: set_at(d.head_ids[2], (9, 0), d.head_ids[2][9, 1])),
    "id out of the vocabulary": ("sc_mis", lambda d: set_at(d.head_ids[2], (9, 0), rig.VOCAB)),
    "NaN in the head": ("sc_mis", lambda d: set_at(d.head_log_q[2], (9, 0), np.nan)),
    "NaN own log-prob": ("grpo", lambda d: set_at(d.log_q[2], 9, np.nan)),
    "-inf own log-prob": ("sc_mis", lambda d: set_at(d.log_q[2], 9, -np.inf)),
    "sampled id out of the vocabulary": ("grpo", lambda d: set_at(d.tokens[2], 23, rig.VOCAB)),
    "NaN advantage": ("grpo", lambda d: set_at(d.advantages[2], 9, np.nan)),
    "head rows missing": ("sc_mis", lambda d: set_at(d.head_ids, 2, d.head_ids[2][:-1])),
    "other head width": ("sc_mis", lambda d: set_at(d.head_ids, 2, d.head_ids[2][:, :-1])),
    "support of other length": (SUPPORT, lambda d: set_at(d.supports, 2, d.supports[0])),
    "support offsets step back": (SUPPORT, lambda d: set_at(d.supports[2].offsets, 3, 10**6)),
    "support mass": (SUPPORT, lambda d: set_at(d.supports[2].log_probs, slice(None), -0.01)),
    "versions of other length": ("sc_mis", lambda d: set_at(d.sources, 2, Source("a", "bf16", np.zeros(1), 0.7))),
}


@pytest.mark.parametrize("case", REJECTED)
def test_a_bad_sample_is_rejected_whole_and_counted(case, caplog):
    """The others keep their gradient and the denominator stays: as if the sample's advantage were zero."""
    arm, change = REJECTED[case]
    data = damaged(arm, change)
    _, grad, report = run(arm, data)
    good = damaged(arm, lambda d: None)
    good.masks[2] = good.masks[2] * 0
    _, expected, _ = run(arm, good)
    assert torch.equal(grad, expected) and expected.abs().max() > 0
    assert report["mixprec/all/rejected_num"] == report["mixprec/pool/a/rejected_num"] == 1
    assert report["mixprec/view/bf16/rejected_num"] == 1
    assert report["mixprec/pool/b/rejected_num"] == report["mixprec/view/fp8/rejected_num"] == 0
    assert report["mixprec/all/rejected_den"] == 4 and report["mixprec/pool/a/rejected_den"] == 2
    assert "sample 2 of pool a" in caplog.text


STOPPED = {
    "temperature": lambda d: set_at(d.sources, 2, dataclasses.replace(d.sources[2], temperature=1.0)),
    "source": lambda d: set_at(d.sources, 2, dataclasses.replace(d.sources[2], view="fp8")),
    "missing": lambda d: set_at(d.head_ids, 2, None),
}


@pytest.mark.parametrize("check", STOPPED)
def test_a_contradiction_of_the_configuration_stops_the_run(check):
    with pytest.raises(ContractError, match=rf"sample 2 of pool a: .*\[{check}\]"):
        run("sc_mis", damaged("sc_mis", STOPPED[check]))


def test_policy_of_a_check_can_be_changed():
    arm, change = REJECTED["NaN in the head"]
    with pytest.raises(ContractError, match=r"sample 2 of pool a: response token 9: head holds log q nan"):
        run(arm, damaged(arm, change), {"contracts": {"head_log_q": "stop"}})
    _, _, report = run("sc_mis", damaged("sc_mis", STOPPED["temperature"]), {"contracts": {"temperature": "reject"}})
    assert report["mixprec/all/rejected_num"] == 1


def test_without_any_record_the_run_stops():
    data = rig.make_data()
    rig.set_parallel()
    batch = rig.local_batch(data, THD, (0, 1))
    del batch["mixprec_source"]
    args = rig.miles_args(rig.mixprec("sc_mis"))
    with pytest.raises(ContractError, match="no head or support was recorded"):
        rig.run_loss(args, batch, rig.local_logits(data, THD, (0, 1), (0, 1)))


@pytest.mark.parametrize("key", ["rollout_log_probs", "advantages", "loss_masks"])
def test_entries_of_other_lengths_stop_the_run(key):
    data = rig.make_data()
    rig.set_parallel()
    batch = rig.local_batch(data, THD, (0, 1))
    batch[key] = [*batch[key][:2], batch[key][2][:-1], batch[key][3]]
    with pytest.raises(ContractError, match=rf"sample 2 of pool a: {key} has 10 values for 11 response tokens"):
        rig.run_loss(rig.miles_args(rig.mixprec("grpo")), batch, rig.local_logits(data, THD, (0, 1), (0, 1)))


@pytest.mark.parametrize(
    ("flag", "value", "remedy"),
    [
        ("calculate_per_token_loss", False, "--calculate-per-token-loss"),
        ("grpo_std_normalization", True, "--disable-grpo-std-normalization"),
        ("use_rollout_logprobs", False, "--use-rollout-logprobs"),
        ("use_tis", True, "no --use-tis"),
        ("use_opsm", True, "no --use-opsm"),
        ("advantage_estimator", "gspo", "--advantage-estimator grpo"),
        ("custom_pg_loss_reducer_function_path", "a.b", "no --custom-pg-loss-reducer-function-path"),
        ("entropy_coef", 0.01, "--entropy-coef 0"),
        ("kl_coef", 0.1, "--kl-coef 0"),
        ("use_kl_loss", True, "--use-kl-loss"),
        ("rollout_temperature", 1.0, "--rollout-temperature 0.7"),
        ("rollout_top_p", 0.9, "--rollout-top-p 1"),
        ("rollout_top_k", 64, "--rollout-top-k -1"),
    ],
)
def test_wrong_recipe_fails_with_the_flag_to_set(flag, value, remedy):
    with pytest.raises(ConfigError, match=remedy) as error:
        run("sc_mis", **{flag: value})
    assert "\n" not in str(error.value) and str(error.value).count(", ") == 0


def test_std_normalisation_belongs_to_the_arms_that_ask_for_it():
    run("mis")
    with pytest.raises(ConfigError, match="std-normalization"):
        run("mis", grpo_std_normalization=False)


def test_reference_kl_has_its_own_score():
    """On a support the policy gradient is of p on S, the reference KL of p on the whole vocabulary."""
    data = rig.make_data(support=True)
    _, plain, _ = run("sc_mis_top_p", data)
    loss, grad, report = run("sc_mis_top_p", data, {"kl_coef": 0.3})
    logits = torch.cat(data.logits)[:, : rig.VOCAB].double().requires_grad_()
    log_p = torch.log_softmax(logits / rig.TEMPERATURE, -1)
    kl = 0.0
    for i, r, row in active_rows(data):
        d = -3.0 - log_p[row, data.tokens[i][data.totals[i] - data.responses[i] + r]]
        kl = kl + (d.exp() - 1 - d).clamp(max=10)
    kl.backward()
    expected = 0.3 * logits.grad
    assert (
        grad[0, : expected.size(0), : rig.VOCAB] - plain[0, : expected.size(0), : rig.VOCAB] - expected
    ).abs().max() < 1e-5
    assert float(loss.detach() - report["pg_loss"]) == pytest.approx(0.3 * kl.item(), rel=1e-5)
    assert mean(report, "all", "reference_kl") == pytest.approx(kl.item() / len(active_rows(data)), rel=1e-5)


def test_bf16_logits():
    data = rig.make_data()
    data.logits = [x.bfloat16() for x in data.logits]
    loss, grad, _ = run("sc_mis", data)
    data.logits = [x.float() for x in data.logits]
    expected_loss, expected, _ = run("sc_mis", data)
    assert grad.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert torch.equal(loss, expected_loss) and torch.equal(grad, expected.bfloat16())


def test_a_support_row_of_an_observation_may_be_empty_or_hold_junk():
    data = rig.make_data(support=True)
    loss, _, _ = run("sc_mis_top_p", data)
    support = data.supports[2]
    at = int(support.offsets[3])  # token 3 is an observation: its row is empty
    assert support.offsets[3] == support.offsets[4]
    data.supports[2] = Support(
        np.concatenate((support.offsets[:4], support.offsets[4:] + 2)),
        np.insert(support.ids, at, [999, 999]).astype(np.int32),
        np.insert(support.log_probs, at, [np.nan, np.nan]).astype(np.float32),
    )
    assert torch.equal(run("sc_mis_top_p", data)[0], loss)
