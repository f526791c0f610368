from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_folder import write_run
from traces import run

from miles_mixprec.guard.plots import Series, line_plot
from miles_mixprec.guard.report import group_series, write_comparison, write_report
from miles_mixprec.guard.signals import RunLogError


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text: list[str] = []
        self.figures = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.figures += tag == "svg"
        if tag in ("script", "link", "img", "iframe", "object"):
            self.loads.append(tag)
        self.loads += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def __contains__(self, text: str) -> bool:
        return text in " ".join(" ".join(self.text).split())


def test_a_report_is_one_file_that_states_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, seed=7)
    text = write_report(tmp_path, rates={"fp8": 1e6}).read_text()
    page = Page(text)
    assert page.loads == []
    assert page.figures == 13
    for fact in (
        "sc_mis_top_p on cpu_quickstart",
        "1,536",
        "seed 7",
        "fp8_e4m3",
        "0 to 15",
        "33.3%",
        "held-out pass@1",
    ):
        assert fact in page, fact
    assert len(re.findall(r'class="name">(?:fp8|nvfp4) <span class="tag note">dequantized', text)) == 2
    assert "dequantized" not in text.split('class="name">bf16', 1)[1].split("</th>", 1)[0]
    assert text.count('class="tag good"') == 8


def test_plots_take_the_colour_of_the_page() -> None:
    svg = line_plot([Series("a", [0, 1, 2], [1.0, None, 3.0]), Series("b", [0, 1, 2], [1.0, 2.0, 900.0])], log=True)
    assert "currentColor" in svg
    assert "#000000" not in svg and "#ffffff" not in svg and "#010203" not in svg
    assert svg == line_plot(
        [Series("a", [0, 1, 2], [1.0, None, 3.0]), Series("b", [0, 1, 2], [1.0, 2.0, 900.0])], log=True
    ), "equal data, equal file"


def test_coordinates_are_rounded_and_figures_are_not() -> None:
    svg = line_plot([Series("a", [0, 1], [0.99991, 0.99994])])
    assert re.search(r">\s*0\.9999\d+\s*<", svg)
    assert not re.search(r' d="[^"]*\.\d{3}', svg)


def test_a_run_without_a_finished_update(tmp_path: Path) -> None:
    write_run(tmp_path, updates=1)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(RunLogError, match="no finished update"):
        write_report(tmp_path)


def test_seeds_of_one_arm_share_a_band() -> None:
    runs = [run(3, reward=lambda n, k=k: 0.1 * n + k) for k in (0.0, 0.2)]
    curves = [{s.update: s.reward.value for s in signals} for signals in (*runs, run(2, reward=lambda n: 0.1))]
    series = group_series("grpo", curves)
    assert series.x == [0, 1, 2]
    assert series.y == pytest.approx([0.1, 0.5 / 3, 0.3])
    assert series.low == pytest.approx([0.0, 0.1, 0.2]) and series.high == pytest.approx([0.2, 0.3, 0.4])
    assert group_series("grpo", [{0: None}]).x == []


def test_a_comparison_has_a_line_per_arm_and_fleet(tmp_path: Path) -> None:
    runs = {"a": ("grpo", 0), "b": ("grpo", 1), "c": ("sc_mis_top_p", 0)}
    for name, (algo, seed) in runs.items():
        write_run(tmp_path / name, algo=algo, seed=seed, updates=4)
    page = Page(write_comparison([tmp_path / name for name in runs], tmp_path / "all.html").read_text())
    assert "grpo on cpu_quickstart 2 runs" in page and "sc_mis_top_p on cpu_quickstart 1 run" in page
    assert page.loads == [] and page.figures == 11


def test_the_module_is_a_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "miles_mixprec.guard.report", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip() == f"{tmp_path}/config.yaml is missing: name the folder of a run, as in run_dir=..."
