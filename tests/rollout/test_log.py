"""What the log hooks write, read back by the guard's own reader."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_mixprec import config as configuration
from miles_mixprec.guard.signals import EvalLine, MetricsLog, RolloutLine, TrainLine
from miles_mixprec.rollout.generate import RECORD
from miles_mixprec.rollout.log import TrainLog, log_eval, log_rollout, pass_at
from miles_mixprec.rollout.record import SamplerRecord


@pytest.fixture
def args(tmp_path):
    values = {
        "run_dir": tmp_path, "run_id": "x", "updates": 9, "prompts_per_update": 2, "fleet.model": "m",
        "weights.store": "s",
    }  # fmt: skip
    config = configuration.load("config", [f"{key}={value}" for key, value in values.items()])
    return SimpleNamespace(mixprec=configuration.to_mapping(config))


def sample(pool, versions, reward, **note):
    versions = np.array(versions, np.int32)
    record = SamplerRecord(
        pool=pool, view=pool, engines=[f"{pool}/0"], turn_offsets=np.array([0, len(versions)], np.int32),
        weight_versions=versions, topk_token_ids=None, topk_log_probs=None, support=None, temperature=1.0, top_p=1.0,
        top_k=-1,
    )  # fmt: skip
    notes = {"ended_on_format_error": False, "length_capped": False, **note}
    made = SimpleNamespace(reward=reward, response_length=len(versions), metadata={"mixprec": notes})
    setattr(made, RECORD, record)
    return made


def test_a_batch_is_split_by_pool_and_observation_tokens_count_for_nothing(args, tmp_path):
    samples = [
        sample("fp8", [3, 3, -1, 4], 1.0),
        sample("fp8", [5, -1], 0.0, ended_on_format_error=True),
        sample("bf16", [5, 5], 1.0, length_capped=True),
    ]
    assert log_rollout(6, args, samples, {"rollout/mixprec/dropped_groups/fp8": 2.0, "other": 1}, 0.1) is False
    (line,) = MetricsLog(tmp_path).read()
    assert isinstance(line, RolloutLine)
    assert (line.update, line.samples, line.format_errors, line.length_capped) == (6, 3, 1, 1)
    assert line.reward == pytest.approx(2 / 3) and line.response_tokens == pytest.approx(8 / 3)
    fp8 = line.per_pool["fp8"]
    assert (fp8.samples, fp8.tokens, fp8.aborted, fp8.versions) == (2, 4, 2, (3, 5))
    assert fp8.staleness == pytest.approx(((6 - 10 / 3) + 1) / 2)
    assert "nvfp4" not in line.per_pool


def test_a_train_line_keeps_our_metrics_and_marks_what_is_not_finite(args, tmp_path):
    log = TrainLog()
    log.init(args, primary=True)
    log.log({"rollout/step": 1})
    log.log({"train/step": 4, "train/grad_norm": float("nan"), "train/mixprec/all/kl_num": 2.0, "train/other": 1.0})
    (line,) = MetricsLog(tmp_path).read()
    assert isinstance(line, TrainLine)
    assert (line.update, line.grad_norm, line.metrics) == (4, None, {"mixprec/all/kl_num": 2.0})


def test_an_evaluation_belongs_to_the_weights_that_were_served(args, tmp_path):
    samples = [
        SimpleNamespace(prompt=prompt, reward=reward, weight_versions=["8", version])
        for prompt, reward, version in [("a", 1.0, "8"), ("a", 0.0, "8"), ("b", 0.0, "9"), ("b", 0.0, "9")]
    ]
    assert log_eval(9, args, {"held_out": {"samples": samples}}, None) is False
    (line,) = MetricsLog(tmp_path).read()
    assert isinstance(line, EvalLine)
    assert (line.update, line.pass_1, line.pass_4, line.episodes) == (7, 0.25, 0.5, 4)


@given(st.lists(st.integers(0, 1), min_size=4, max_size=8))
def test_pass_at_k_is_the_mean_over_all_subsets(rewards):
    from itertools import combinations

    for k in (1, 4):
        subsets = list(combinations(rewards, k))
        assert pass_at(k, rewards) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))
