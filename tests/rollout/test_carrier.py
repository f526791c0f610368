import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_mixprec.errors import ContractError
from miles_mixprec.rollout.carrier import batch_entries, pack, unpack
from miles_mixprec.rollout.record import SamplerRecord, Support


@st.composite
def records(draw):
    rows = draw(st.integers(0, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    head = support = None
    k = draw(st.integers(1, 5))
    if draw(st.booleans()):
        head = (rng.integers(-1, 500, (rows, k)).astype(np.int32), rng.normal(size=(rows, k)).astype(np.float32))
    else:
        widths = rng.integers(0, 4, rows)
        offsets = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
        total = int(offsets[-1])
        support = Support(
            offsets, rng.integers(0, 500, total).astype(np.int32), rng.normal(size=total).astype(np.float32)
        )
    return SamplerRecord(
        pool="fp8",
        view="fp8",
        engines=["fp8/0", "fp8/1"],
        turn_offsets=np.array([0, rows // 2, rows], np.int32),
        weight_versions=rng.integers(-1, 9, rows).astype(np.int32),
        topk_token_ids=head and head[0],
        topk_log_probs=head and head[1],
        support=support,
        temperature=1.0,
        top_p=0.97,
        top_k=64,
    )


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=True)
    if isinstance(a, Support):
        return all(same(getattr(a, name), getattr(b, name)) for name in ("offsets", "ids", "log_probs"))
    return a == b


@given(records())
def test_what_is_packed_comes_back_bit_for_bit(record):
    back = unpack(pack(record))
    assert all(same(value, vars(back)[name]) for name, value in vars(record).items())


@given(records())
def test_the_batch_gets_the_names_that_newer_miles_uses(record):
    batch = batch_entries([pack(record), pack(record)])
    assert set(batch) == {
        "rollout_topk_token_ids",
        "rollout_topk_log_probs",
        "rollout_sampling_mask",
        "mixprec_source",
    }
    assert all(len(entries) == 2 for entries in batch.values())
    assert same(batch["rollout_sampling_mask"][1], record.support)
    assert batch["mixprec_source"][0].pool == "fp8"


@pytest.mark.parametrize("blob", [b"", b"sort 1 2", b"\xc0", b"\x92\x01\x80"])
def test_foreign_bytes_are_refused(blob):
    with pytest.raises(ContractError, match="carrier"):
        unpack(blob)


def test_a_head_of_128_costs_a_kibibyte_a_token():
    rows = 1000
    record = SamplerRecord(
        pool="a", view="bf16", engines=["a/0"], turn_offsets=np.array([0, rows], np.int32),
        weight_versions=np.zeros(rows, np.int32), topk_token_ids=np.zeros((rows, 128), np.int32),
        topk_log_probs=np.zeros((rows, 128), np.float32), support=None, temperature=1.0, top_p=1.0, top_k=-1,
    )  # fmt: skip
    assert len(pack(record)) / rows < 1024 + 8
