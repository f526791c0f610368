"""Run a study, or part of it, and write its report.

    bash examples/claims/run.sh study=claims                 run what is missing, then report
    bash examples/claims/run.sh study=claims action=list     print the one command of every cell
    bash examples/claims/run.sh study=claims action=report   report from the kept data
    ... arms=grpo,sc fleets=mixed seeds=0 regimes=base       only these cells

Finished cells are kept as data and not run again; an unfinished one goes on from its last checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from claims.report import write_reports
from claims.results import keep, load_results, missing
from claims.study import ROOT, Cell, Study, choose, command, command_line, load_study, run_dir
from miles_mixprec.errors import ConfigError, MixprecError
from miles_mixprec.guard.signals import MetricsLog, finished

ACTIONS = ("run", "list", "report")
OPTIONS = {"study": "claims", "action": "run", "arms": "", "fleets": "", "seeds": "", "regimes": ""}
POLL_S = 1.0

console = Console(highlight=False)


def main(words: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options = parse(words)
        study = load_study(options["study"])
        arms, fleets, seeds, regimes = (_list(options[key]) for key in ("arms", "fleets", "seeds", "regimes"))
        chosen = choose(study, arms, fleets, [int(seed) for seed in seeds], regimes)
        if options["action"] == "list":
            for cell in chosen:
                console.print(command_line(study, cell), soft_wrap=True)
            return 0
        failed = run(study, chosen) if options["action"] == "run" else []
        for path in write_reports(study, load_results(study)):
            console.print(os.path.relpath(path), soft_wrap=True)
        return 1 if failed else 0
    except MixprecError as error:
        console.print(f"error: {error}", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on")
        return 130


def parse(words: Sequence[str]) -> dict[str, str]:
    """Raises ConfigError for anything but `key=value` with a known key."""
    options = dict(OPTIONS)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in options:
            raise ConfigError(f"{word}: use {', '.join(f'{k}=...' for k in OPTIONS)}")
        options[key] = value
    if options["action"] not in ACTIONS:
        raise ConfigError(f"action={options['action']}: use one of {', '.join(ACTIONS)}")
    return options


def run(study: Study, chosen: Sequence[Cell]) -> list[Cell]:
    """Run the cells that are not kept yet, one after the other, and keep them. Returns those that failed."""
    todo = missing(study, chosen)
    kept = len(chosen) - len(todo)
    console.print(f"{study.name}: {study.purpose}. {kept} of {len(chosen)} cells are kept", soft_wrap=True)
    failed: list[Cell] = []
    begun = time.monotonic()
    for index, cell in enumerate(todo):
        console.print(command_line(study, cell), soft_wrap=True)
        status = _run(study, cell, f"{cell.name} ({index + 1} of {len(todo)})")
        if status:
            failed.append(cell)
            console.print(f"{cell.name} ended with status {status}; see {_log(study, cell)}", soft_wrap=True)
            continue
        keep(study, cell)
        left = (time.monotonic() - begun) / (index + 1) * (len(todo) - index - 1)
        console.print(f"{cell.name} is kept; {len(todo) - index - 1} cells left, about {left / 60:.0f} min")
    return failed


def _run(study: Study, cell: Cell, label: str) -> int:
    """One cell in a process of its own; its updates move a bar. Returns its exit status."""
    log = MetricsLog(ROOT / run_dir(study, cell))
    log.path.parent.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _log(study, cell).open("ab") as output, Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(label, total=study.updates)
        process = subprocess.Popen(command(study, cell), cwd=ROOT, stdout=output, stderr=output)
        try:
            while process.poll() is None:
                progress.update(bar, completed=len(finished(log.read())))
                time.sleep(POLL_S)
        finally:
            process.terminate()  # if this one was interrupted; the cell stops what it started and can go on later
            process.wait()
        return process.returncode


def _log(study: Study, cell: Cell) -> Path:
    return ROOT / run_dir(study, cell) / "console.log"


def _list(value: str) -> list[str]:
    return [part for part in value.split(",") if part]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
