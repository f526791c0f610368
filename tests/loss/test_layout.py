from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_mixprec.loss.layout import Layout, local_tokens

SAMPLES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 14)), min_size=1, max_size=5)


def layouts(samples, cp_size, bshd, all_gather):
    totals = [prompt + response for prompt, response in samples]
    longest = -(-max(totals) // (2 * cp_size)) * 2 * cp_size
    packed = -(-sum(totals) // cp_size)
    return [
        Layout(
            totals,
            [response for _, response in samples],
            [longest] * len(totals) if bshd else None,
            rank,
            cp_size,
            all_gather,
            packed,
        )
        for rank in range(cp_size)
    ]


@settings(max_examples=150, deadline=None)
@given(SAMPLES, st.sampled_from([1, 2, 3, 4]), st.booleans(), st.booleans())
def test_every_response_token_is_scored_once(samples, cp_size, bshd, all_gather):
    ranks = [local_tokens(layout) for layout in layouts(samples, cp_size, bshd, all_gather)]
    seen = [(s, r) for rank in ranks for s, r in zip(rank.sample.tolist(), rank.position.tolist(), strict=True)]
    assert sorted(seen) == [(i, r) for i, (_, response) in enumerate(samples) for r in range(response)]
    for rank in ranks:
        assert np.unique(rank.rows).size == rank.rows.size
        order = list(zip(rank.sample.tolist(), rank.position.tolist(), strict=True))
        assert order == sorted(order)


@pytest.mark.miles
@settings(max_examples=60, deadline=None)
@given(SAMPLES, st.sampled_from([1, 2, 4]), st.sampled_from([("thd", False), ("bshd", False), ("thd", True)]))
def test_same_rows_as_miles(samples, cp_size, kind):
    """Miles' own slicing, asked for row numbers: logits that hold their row, tokens that hold their position."""
    from miles.backends.training_utils import parallel
    from miles.backends.training_utils.loss import get_log_probs_and_entropy

    get_responses = get_log_probs_and_entropy.__globals__["get_responses"]
    qkv_format, all_gather = kind
    samples = [(prompt, response) for prompt, response in samples if response] or [
        (2, 3)
    ]  # Miles mishandles empty ones
    totals = [prompt + response for prompt, response in samples]
    for rank, layout in enumerate(layouts(samples, cp_size, qkv_format == "bshd", all_gather)):
        rows = {
            ("thd", False): sum(-(-t // (2 * cp_size)) * 2 if cp_size > 1 else t for t in totals),
            ("bshd", False): sum(layout.max_seq_lens or [0]) // cp_size,
            ("thd", True): layout.local_rows,
        }[kind]
        parallel.set_parallel_state(SimpleNamespace(cp=SimpleNamespace(rank=rank, size=cp_size)))
        found = list(
            get_responses(
                torch.arange(rows, dtype=torch.float32)[None, :, None],
                args=SimpleNamespace(
                    qkv_format=qkv_format, rollout_temperature=1.0, true_on_policy_mode=False, allgather_cp=all_gather
                ),
                unconcat_tokens=[torch.arange(total) for total in totals],
                total_lengths=totals,
                response_lengths=layout.response_lengths,
                max_seq_lens=layout.max_seq_lens,
            )
        )
        local = local_tokens(layout)
        assert local.rows.tolist() == torch.cat([row for row, _ in found])[:, 0].long().tolist()
        prompts = [prompt for prompt, _ in samples]
        positions = [token - prompts[i] for i, (_, tokens) in enumerate(found) for token in tokens.tolist()]
        assert local.position.tolist() == positions
