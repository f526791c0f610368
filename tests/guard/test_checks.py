from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_folder import write_run

from miles_mixprec.guard.checks import checks
from miles_mixprec.guard.report import load_run
from miles_mixprec.guard.signals import MetricsLog

SHARE, ATTRIBUTION, KL, SUPPORT, VERSIONS, REWARD, CONTRACTS, COLLAPSE = range(8)


def outcome(run_dir: Path, index: int) -> tuple[bool | None, str]:
    run = load_run(run_dir)
    check = checks(run.config, run.signals, run.verdicts)[index]
    return check.passed, check.figure


def rewrite(run_dir: Path, kind: str, change: Callable[[dict[str, Any]], None]) -> None:
    path = MetricsLog(run_dir).path
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == kind:
            change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_good_run_passes_every_check(tmp_path: Path) -> None:
    write_run(tmp_path)
    run = load_run(tmp_path)
    assert [c.passed for c in checks(run.config, run.signals, run.verdicts)] == [True] * 8


@pytest.mark.parametrize(("off", "passed"), [(0.04, True), (0.07, False)])
def test_shares(tmp_path: Path, off: float, passed: bool) -> None:
    write_run(tmp_path, shares={"bf16": 1 / 6 - off, "fp8": 1 / 3, "nvfp4": 1 / 2 + off})
    assert outcome(tmp_path, SHARE)[0] is passed


def test_a_pool_without_samples_is_a_share_error(tmp_path: Path) -> None:
    write_run(tmp_path, shares={"fp8": 0.4, "nvfp4": 0.6})
    assert outcome(tmp_path, SHARE) == (False, "largest error -16.7 points (bf16)")
    assert outcome(tmp_path, VERSIONS)[0] is False


def test_samples_of_no_pool_of_the_fleet(tmp_path: Path) -> None:
    write_run(tmp_path, updates=2)
    rewrite(tmp_path, "rollout", lambda line: line["per_pool"].update(unknown=line["per_pool"].pop("bf16")))
    assert outcome(tmp_path, ATTRIBUTION) == (False, "160 of 192 samples")


def test_kl_of_quantised_pools(tmp_path: Path) -> None:
    write_run(tmp_path)

    def swap(line: dict[str, Any], update: int) -> None:
        if line["update"] == update:
            line["metrics"]["mixprec/pool/fp8/kl_num"] = 0.0

    rewrite(tmp_path, "train", lambda line: swap(line, 5))
    assert outcome(tmp_path, KL)[0] is True, "staler updates do not count"
    rewrite(tmp_path, "train", lambda line: swap(line, 0))
    assert outcome(tmp_path, KL)[0] is False
    write_run(tmp_path / "one", fleet="cpu_homogeneous")
    assert outcome(tmp_path / "one", KL)[0] is None


@pytest.mark.parametrize(
    ("algo", "ratio", "passed"),
    [("sc_mis_top_p", 1.0, True), ("sc_mis_top_p", 1.01, False), ("sc_mis_top_p", 0.99, False), ("sc", 1.2, None)],
)
def test_masses_on_the_support(tmp_path: Path, algo: str, ratio: float, passed: bool | None) -> None:
    write_run(tmp_path, algo=algo, mass_ratio=ratio)
    assert outcome(tmp_path, SUPPORT)[0] is passed


def test_a_pool_that_keeps_its_weights(tmp_path: Path) -> None:
    write_run(tmp_path)
    rewrite(tmp_path, "rollout", lambda line: line["per_pool"]["nvfp4"].update(versions=[0, 0]))
    assert outcome(tmp_path, VERSIONS) == (False, "bf16 0 to 15, fp8 0 to 15, nvfp4 0 to 0")


def test_reward(tmp_path: Path) -> None:
    write_run(tmp_path, reward=lambda n: 0.5 - 0.02 * n)
    assert outcome(tmp_path, REWARD)[0] is False


def test_rejected_samples(tmp_path: Path) -> None:
    write_run(tmp_path, updates=2)
    rewrite(tmp_path, "train", lambda line: line["metrics"].update({"mixprec/all/rejected_num": 1.0}))
    assert outcome(tmp_path, CONTRACTS) == (False, "1.04% of the samples rejected")


def test_collapse(tmp_path: Path) -> None:
    write_run(tmp_path, reward=lambda n: 0.5 if n < 8 else 0.05, kl_growth=lambda n: 1.0 if n < 8 else 50.0)
    passed, figure = outcome(tmp_path, COLLAPSE)
    assert passed is False and figure.startswith("update 10: sampler-trainer KL")


def test_a_run_of_two_updates_is_not_judged_on_its_course(tmp_path: Path) -> None:
    write_run(tmp_path, updates=2)
    assert outcome(tmp_path, REWARD)[0] is None
    assert outcome(tmp_path, COLLAPSE)[0] is None
    assert outcome(tmp_path, VERSIONS)[0] is True
