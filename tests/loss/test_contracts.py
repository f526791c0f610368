import math

import numpy as np
import pytest
import torch

from miles_mixprec.errors import ConfigError, ContractError
from miles_mixprec.loss import contracts
from miles_mixprec.loss.contracts import check_head, check_offsets, check_sampled, check_support, judge, require

LOG_Q = torch.tensor([0.5, 0.3, 0.1]).log()
HEAD = torch.tensor([[4, 2, 7]], dtype=torch.int32)
SAMPLED = torch.tensor([2])
OWN = LOG_Q[1:2]
ADVANTAGE = torch.ones(1)


def failed(findings):
    return [finding.check for finding in findings if finding.bad.any()]


def head(ids=HEAD, log_q=LOG_Q[None], sampled=SAMPLED, own=OWN, advantage=ADVANTAGE):
    return failed(check_head(ids, log_q, sampled, own, advantage, 8))


def support(ids=(4, 2, 7), q=(0.5, 0.4, 0.1), sampled=SAMPLED, own=-0.9162907, offsets=None):
    offsets = torch.tensor([0, len(ids)]) if offsets is None else offsets
    own = torch.tensor([own])
    log_q = torch.tensor(q).log()
    return failed(check_support(offsets, torch.tensor(ids), log_q, sampled, own, ADVANTAGE, 8))


def test_good_data_passes():
    assert head() == support() == []
    assert head(sampled=torch.tensor([5]), own=torch.tensor([-9.0])) == []  # sampled off the head: fine
    assert head(ids=torch.tensor([[2, -1, -1]]), log_q=torch.tensor([[OWN[0], -math.inf, math.nan]])) == []


@pytest.mark.parametrize(
    ("check", "found"),
    [
        ("token_id", lambda: head(sampled=torch.tensor([8]))),
        ("token_id", lambda: head(sampled=torch.tensor([-1]))),
        ("log_q", lambda: head(own=torch.tensor([math.nan]), sampled=torch.tensor([5]))),
        ("log_q", lambda: head(own=torch.tensor([-math.inf]), sampled=torch.tensor([5]))),
        ("log_q", lambda: head(own=torch.tensor([0.2]), sampled=torch.tensor([5]))),
        ("advantage", lambda: head(advantage=torch.tensor([math.nan]))),
        ("head_id", lambda: head(ids=torch.tensor([[4, 2, 8]]))),
        ("head_id", lambda: head(ids=torch.tensor([[4, 2, -2]]))),
        ("head_duplicate", lambda: head(ids=torch.tensor([[4, 2, 4]]))),
        ("head_log_q", lambda: head(log_q=torch.tensor([[-1.0, OWN[0], math.nan]]))),
        ("head_log_q", lambda: head(log_q=torch.tensor([[-1.0, OWN[0], -math.inf]]))),
        ("head_mass", lambda: head(log_q=torch.tensor([[0.8, 0.3, 0.1]]).log())),
        ("head_empty", lambda: head(ids=torch.full((1, 3), -1))),
        ("disagreement", lambda: head(own=OWN + 0.01)),
        ("support_id", lambda: support(ids=(4, 2, 8))),
        ("support_id", lambda: support(ids=(4, 2, -1))),
        ("support_duplicate", lambda: support(ids=(4, 2, 4))),
        ("support_log_q", lambda: support(q=(0.6, 0.4, 0.0))),
        ("support_mass", lambda: support(q=(0.5, 0.4, 0.05))),
        ("support_mass", lambda: support(q=(0.7, 0.4, 0.1))),
        ("support_sampled", lambda: support(ids=(4, 3, 7))),
        ("support_sampled", lambda: support(ids=(), q=(), offsets=torch.tensor([0, 0]))),
        ("disagreement", lambda: support(own=math.log(0.41))),
    ],
)
def test_each_check_fires(check, found):
    assert check in found()


def test_mass_within_tolerance_passes():
    assert head(log_q=torch.tensor([[0.6, 0.3, 0.1009]]).log()) == []
    assert support(q=(0.5, 0.4, 0.1009)) == []
    assert support(q=(0.5, 0.4, 0.0991)) == []


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 4], [0, 3, 3]])
def test_offsets(offsets):
    assert failed(check_offsets(torch.tensor(offsets), torch.arange(3), torch.zeros(3), 1)) == ["offsets"]


def test_offsets_never_step_back():
    assert failed(check_offsets(torch.tensor([0, 2, 1, 3]), torch.arange(3), torch.zeros(3), 3)) == ["offsets"]
    assert failed(check_offsets(torch.tensor([0, 2, 2, 3]), torch.arange(3), torch.zeros(3), 3)) == []


def test_rows_do_not_leak_into_each_other():
    """The same id in two rows is no duplicate, and a bad row is found where it is."""
    offsets = torch.tensor([0, 2, 2, 5])
    ids = torch.tensor([1, 2, 2, 1, 2])
    q = torch.tensor([0.5, 0.5, 0.2, 0.3, 0.5])
    sampled = torch.tensor([1, 0, 1])
    own = q[[0, 0, 3]].log()
    findings = {f.check: f.bad.tolist() for f in check_support(offsets, ids, q.log(), sampled, own, torch.ones(3), 8)}
    assert findings["support_duplicate"] == [False, False, True]
    assert findings["support_sampled"] == [False, True, False]
    assert findings["support_mass"] == [False, True, False]


def test_require_names_row_and_value():
    findings = check_sampled(torch.tensor([1, 9]), torch.full((2,), -1.0), torch.ones(2), 8)
    with pytest.raises(ContractError, match=r"^row 1: sampled id 9 is outside the vocabulary; set --vocab-size .*\["):
        require(findings)


def test_policies():
    findings = check_sampled(torch.tensor([1, 9, 2, 11]), torch.full((4,), -1.0), torch.ones(4), 8)
    sample, token = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 5])
    assert judge(findings, sample, token, ["a", "b"], {}) == {0, 1}
    with pytest.raises(ContractError, match=r"sample 0 of pool a: response token 1: sampled id 9 .*\[token_id\]"):
        judge(findings, sample, token, ["a", "b"], {"token_id": "stop"})
    contracts.check_policy({"head_mass": "stop", "temperature": "reject"})
    for bad in ({"head_mass": "ignore"}, {"head_masses": "stop"}):
        with pytest.raises(ConfigError, match=r"algo\.contracts\."):
            contracts.check_policy(bad)


def test_messages_are_one_line_with_a_remedy():
    for check in contracts.DEFAULT_POLICY:
        message = str(contracts.Violation(check, 3, 7, "fp8", 2.0))
        assert message.startswith("sample 3 of pool fp8: response token 7: ") and message.endswith(f"[{check}]")
        assert "\n" not in message and (";" in message)
