from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from claims.report import write_reports
from claims.results import keep, load_results
from claims.study import cells, load_study
from evidence import evidence
from run_folder import write_run


def test_a_table_claim_by_claim_and_a_page_of_curves(tmp_path: Path) -> None:
    given = evidence()
    study = replace(given.study, docs=str(tmp_path), seeds=given.study.seeds)
    few = [r for r in given.results if r.cell.arm == "grpo"]
    markdown, page = write_reports(study, few)
    text = markdown.read_text()
    assert "| 1a | Plain GRPO collapses on mixed samplers. |" in text
    assert "**holds**" in text and "**cannot be judged**" in text
    assert "| grpo, mixed | 3 | 28; 30; 32 | three signs |" in text
    assert "dequantized" in text and "6 of 36 cells are in" in text
    command = "    bash examples/cpu_quickstart/run.sh algo=mis fleet=cpu_homogeneous seed=2 "
    assert command in text, "cells that are not in yet have their command too"
    html = page.read_text()
    assert html.count("<svg") > 10 and "<script" not in html and "http" not in html.replace("http://www.w3.org", "")
    assert "dequantized" in html


def test_a_study_of_regimes_has_a_row_each_and_no_claims(tmp_path: Path) -> None:
    study = replace(
        load_study("claims_regime"),
        updates=6,
        seeds=[0],
        regimes={"base": [], "lr10": ["learning_rate=2e-3"]},
        **{name: str(tmp_path / name) for name in ("runs", "data", "docs")},
    )
    for cell in cells(study):
        write_run(tmp_path / "runs" / study.name / cell.name, updates=6, algo="grpo")
        keep(study, cell)
    markdown, _ = write_reports(study, load_results(study))
    text = markdown.read_text()
    assert "| grpo, mixed, base | 1 |" in text and "| grpo, mixed, lr10 | 1 |" in text
    assert "Claim by claim" not in text
    assert "Regime lr10: `learning_rate=2e-3`." in text
