"""Replies of SGLang 0.5.23's /generate, as its server writes them, become aligned arrays."""

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_mixprec.config import Algo
from miles_mixprec.errors import CapabilityError, ConfigError, ContractError
from miles_mixprec.rollout.capture import Trajectory, read_reply, request_body

PLAIN = Algo(name="grpo")
HEAD = Algo(name="sc", score_centering=True, head=3)
TOP_P = Algo(name="sc_mis_top_p", score_centering=True, weights="mis", top_p=0.97, top_k=64)


def b64(values, dtype):
    return base64.b64encode(np.array(values, dtype=dtype).tobytes()).decode()


def reply(ids, log_probs, **meta):
    return {
        "output_ids": list(ids),
        "meta_info": {
            "output_token_logprobs": [[lp, i, None] for lp, i in zip(log_probs, ids, strict=True)],
            "finish_reason": {"type": "stop", "matched": 2},
            "weight_version": "4",
            **meta,
        },
    }


def head_meta(ids, log_probs):
    return {
        "output_top_logprobs_val_flat_b64": b64(log_probs, "<f4"),
        "output_top_logprobs_idx_flat_b64": b64(ids, "<i4"),
        "output_top_logprobs_shape": list(np.shape(ids)),
        "output_top_logprobs_null_prefix": 0,
    }


def test_head_is_decoded_and_the_sampled_log_prob_comes_from_it():
    meta = head_meta([[7, 1, 2], [4, 5, 6]], [[-0.1, -2.0, -3.0], [-0.5, -1.0, -2.0]])
    out = read_reply(HEAD, reply([1, 9], [-2.0001, -7.0], **meta), pool="a")
    assert out.topk_token_ids.tolist() == [[7, 1, 2], [4, 5, 6]]
    assert out.log_probs.tolist() == [
        np.float32(-2.0),
        np.float32(-7.0),
    ]  # row 1: sampled outside the head keeps its own
    assert out.versions.tolist() == [4, 4]


def test_support_rows_are_ragged_and_hold_the_sampled_token():
    meta = {
        "output_token_sampling_mask": [[3], [8, 9, 1]],
        "output_token_sampling_logprobs": [[0.0], [-0.5, -1.5, -1.8]],
    }
    out = read_reply(TOP_P, reply([3, 9], [-0.01, -1.6], **meta), pool="a")
    assert out.support.offsets.tolist() == [0, 1, 4]
    assert out.support.ids.tolist() == [3, 8, 9, 1]
    assert out.log_probs.tolist() == [0.0, -1.5]


@pytest.mark.parametrize("row", [[8, 1], [9, 9, 1]])
def test_sampled_token_must_occur_once_in_its_support(row):
    meta = {"output_token_sampling_mask": [row], "output_token_sampling_logprobs": [[-1.0] * len(row)]}
    with pytest.raises(ContractError, match=r"pool a: sampled token 9 occurs [02] times"):
        read_reply(TOP_P, reply([9], [-1.0], **meta), pool="a")


def test_rows_that_differ_in_length_are_refused():
    meta = {"output_token_sampling_mask": [[9, 1]], "output_token_sampling_logprobs": [[-1.0]]}
    with pytest.raises(ContractError, match="differ in length"):
        read_reply(TOP_P, reply([9], [-1.0], **meta), pool="a")


@pytest.mark.parametrize(
    ("algo", "field"), [(HEAD, "output_top_logprobs_val_flat_b64"), (TOP_P, "output_token_sampling_mask")]
)
def test_an_engine_that_leaves_data_out_is_named(algo, field):
    with pytest.raises(CapabilityError, match=rf"pool fp8: .*{field}.*0\.5\.23"):
        read_reply(algo, reply([1], [-1.0]), pool="fp8")


def test_head_of_another_width_is_refused():
    with pytest.raises(ContractError, match=r"shape \(1, 2\), asked for \(1, 3\)"):
        read_reply(HEAD, reply([1], [-1.0], **head_meta([[1, 2]], [[-1.0, -2.0]])), pool="a")


def test_versions_follow_the_spans_of_a_turn_that_ran_across_an_update():
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}]
    out = read_reply(PLAIN, reply([1, 2, 3], [-1, -1, -1], weight_versions=spans), pool="a")
    assert out.versions.tolist() == [4, 4, 5]


def test_a_version_that_is_no_number_is_refused():
    with pytest.raises(ContractError, match="'default' is no number"):
        read_reply(PLAIN, reply([1], [-1.0], weight_version="default"), pool="a")


def test_request_pins_the_distribution_and_asks_for_the_arm_s_data():
    body = request_body(TOP_P, [1, 2], {"temperature": 1.0, "top_p": 0.97, "top_k": 64, "max_new_tokens": 5})
    assert body["return_sampling_mask"] and body["sampling_logprobs_mode"] == "support"
    assert body["sampling_params"]["min_p"] == 0.0 and body["sampling_params"]["repetition_penalty"] == 1.0
    assert body["sampling_params"]["top_k"] == 64  # the resolved value itself, never left to the engine
    assert request_body(HEAD, [1], {})["top_logprobs_num"] == 3
    assert "top_logprobs_num" not in request_body(PLAIN, [1], {})


@pytest.mark.parametrize(("key", "value"), [("temperature", 0.7), ("top_p", 0.9), ("top_k", -1)])
def test_miles_flags_that_contradict_the_arm_are_refused(key, value):
    with pytest.raises(ConfigError, match=rf"--rollout-{key.replace('_', '-')} .* differs from algo.{key}"):
        request_body(TOP_P, [1], {key: value})


def test_constrained_sampling_is_refused():
    with pytest.raises(ConfigError, match="json_schema"):
        request_body(TOP_P, [1], {"json_schema": "{}"})


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=5))
def test_turns_and_observations_stay_aligned(turns):
    """Row r of every array belongs to response token r, whatever the lengths of turns and observations."""
    trajectory, expected = Trajectory(TOP_P, "a", "bf16"), []
    for turn, (generated, observed) in enumerate(turns):
        rows = [[100 * turn + i, 9999] for i in range(generated)]
        meta = {
            "weight_version": str(turn),
            "output_token_sampling_mask": rows,
            "output_token_sampling_logprobs": [[-0.7, -0.7] for _ in rows],
        }
        trajectory.add_reply(
            f"a/{turn}", read_reply(TOP_P, reply([r[0] for r in rows], [-0.7] * generated, **meta), pool="a")
        )
        trajectory.add_observation([5] * observed)
        expected += [(row, turn) for row in rows] + [(None, -1)] * observed
    record = trajectory.record()
    assert len(trajectory.ids) == len(expected) == len(record.weight_versions)
    assert trajectory.loss_mask == [int(row is not None) for row, _ in expected]
    for r, (row, version) in enumerate(expected):
        members = record.support.ids[record.support.offsets[r] : record.support.offsets[r + 1]].tolist()
        assert members == (row or [])
        assert record.weight_versions[r] == version
    assert record.turn_offsets[-1] == len(expected) and len(record.engines) == len(turns)
