from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import pytest
from rich.console import Console
from run_folder import write_run

from miles_mixprec.guard.live import ROWS, follow, table
from miles_mixprec.guard.report import load_run
from miles_mixprec.guard.signals import MetricsLog, RunLogError


def stopped() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def shown(run_dir: Path, *, terminal: bool, width: int = 110) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, height=60)
    follow(run_dir, stopped(), console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_plain_line_per_update(tmp_path: Path) -> None:
    write_run(tmp_path, updates=3)
    lines = shown(tmp_path, terminal=False).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["update 0", "update 1", "update 2"]
    train = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    seconds = next(line["seconds"] for line in train if line["kind"] == "train")
    dollars = seconds / 3600 * 0.09
    assert f"$ {dollars:.4f}" in lines[0]
    assert "fp8 33% " in lines[0] and "tail ratio " in lines[0]
    assert "\x1b" not in lines[0]


def test_the_table_names_what_runs_dequantized(tmp_path: Path) -> None:
    write_run(tmp_path, updates=3)
    text = shown(tmp_path, terminal=True).rsplit("cpu_quickstart: ", 1)[1]
    assert "3 of 3 updates" in text
    assert "…" not in text and "50% 9e-03" in text
    assert "fp8*" in text and "nvfp4*" in text and "bf16*" not in text
    assert "* dequantized: encoded to its format, decoded to BF16 to run (fp8, nvfp4)" in text
    for heading in ("reward", "tail", "masked", "staleness", "format", "$"):
        assert heading in text


def test_a_narrow_terminal_gets_lines(tmp_path: Path) -> None:
    write_run(tmp_path, updates=1)
    assert shown(tmp_path, terminal=True, width=80).startswith("update 0  reward")


def test_the_table_keeps_the_newest_updates(tmp_path: Path) -> None:
    config = write_run(tmp_path, updates=ROWS + 10)
    view = table(load_run(tmp_path).signals, config)
    assert view.row_count == ROWS
    assert next(iter(view.columns[0].cells)) == "10"


@pytest.mark.parametrize("terminal", [False, True])
def test_follows_a_run_that_goes_on(tmp_path: Path, terminal: bool) -> None:
    write_run(tmp_path / "whole", updates=2)
    lines = MetricsLog(tmp_path / "whole").path.read_bytes().splitlines(keepends=True)
    growing = tmp_path / "growing"
    growing.mkdir()
    (growing / "config.yaml").write_bytes((tmp_path / "whole" / "config.yaml").read_bytes())
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200, height=60)
    stop = threading.Event()
    follower = threading.Thread(target=follow, args=(growing, stop), kwargs={"console": console, "poll_s": 0.01})
    follower.start()
    with (growing / "metrics.jsonl").open("ab", buffering=0) as file:
        for line in lines:
            file.write(line[:50])
            file.write(line[50:])
    stop.set()
    follower.join(timeout=30)
    assert not follower.is_alive()
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert ("2 of 2 updates" in text) if terminal else (text.count("update ") == 2)


def test_a_folder_that_holds_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match=r"config\.yaml is missing"):
        follow(tmp_path, stopped())
