"""A run in the terminal: one row per update, as the run log grows.

On a terminal that is wide enough a table that redraws itself; elsewhere one plain line per update, fit for a log file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from threading import Event

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from miles_mixprec.config import Config, Fleet
from miles_mixprec.guard.cost import billed
from miles_mixprec.guard.signals import Mean, MetricsLog, Signals, finished, read_config

ROWS = 20
RUN_WIDTH, POOL_WIDTH = 74, 11  # characters of the table's columns


def follow(
    run_dir: str | os.PathLike[str], stop: Event, *, console: Console | None = None, poll_s: float = 0.5
) -> None:
    """Show the run in `run_dir` until `stop` is set, and what was logged until then.

    Raises RunLogError when the folder holds no configuration or a line that is not of the log's format.
    """
    console = console or Console()
    config = read_config(run_dir)
    runs = _snapshots(MetricsLog(run_dir), stop, poll_s)
    if console.is_terminal and console.width >= RUN_WIDTH + POOL_WIDTH * len(config.fleet.pools):
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            for run in runs:
                live.update(table(run, config), refresh=True)
    else:
        shown: set[int] = set()
        for run in runs:
            for signals in run:
                if signals.update not in shown:
                    console.print(line(signals, config.fleet), soft_wrap=True, highlight=False, markup=False)
                    shown.add(signals.update)


def line(signals: Signals, fleet: Fleet) -> str:
    """One update as one line: `update 3  reward 0.41  KL 1.2e-03  bf16 17% KL 4e-04  ...`."""
    fields = [f"update {signals.update}", *(f"{name} {text}" for name, text in _run_cells(signals, fleet))]
    pools = [f"{name} {_pool_cell(signals, name)}" for name in fleet.pools]
    return "  ".join([*fields, *pools])


def table(run: Sequence[Signals], config: Config) -> Table:
    """The newest `ROWS` updates."""
    fleet = config.fleet
    dequantized = [name for name, pool in fleet.pools.items() if pool.execution == "dequantized"]
    title = f"{config.algo.name} on {fleet.name}: {len(run)} of {config.updates} updates"
    caption = "per pool: share of the samples, sampler-trainer KL"
    if dequantized:
        caption += f"\n* dequantized: encoded to its format, decoded to BF16 to run ({', '.join(dequantized)})"
    view = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("update", *(name for name, _ in _run_cells(Signals(update=0), fleet))):
        view.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for name in fleet.pools:
        view.add_column(f"{name}*" if name in dequantized else name, justify="right", no_wrap=True)
    for signals in run[-ROWS:]:
        cells = [text for _, text in _run_cells(signals, fleet)]
        view.add_row(str(signals.update), *cells, *(_pool_cell(signals, name) for name in fleet.pools))
    return view


def _run_cells(signals: Signals, fleet: Fleet) -> Iterable[tuple[str, str]]:
    yield "reward", _text(signals.reward, "{:.3f}")
    yield "KL", _text(signals.kl, "{:.1e}")
    yield "tail ratio", _text(signals.tail_ratio if signals.tail_ratio.den else signals.mass_ratio, "{:.4f}")
    yield "masked", _text(signals.masked, "{:.2%}")
    yield "staleness", _text(signals.staleness, "{:.1f}")
    yield "format errors", _text(signals.format_errors, "{:.0%}")
    yield "s", f"{signals.seconds:.1f}"
    yield "$", f"{sum(billed(fleet, signals.seconds).values()):.4f}"


def _pool_cell(signals: Signals, name: str) -> str:
    pool = signals.pools.get(name)
    return "-" if pool is None else f"{_text(pool.share, '{:.0%}')} {_text(pool.kl, '{:.0e}')}"


def _text(mean: Mean, form: str) -> str:
    return "-" if mean.value is None else form.format(mean.value)


def _snapshots(log: MetricsLog, stop: Event, poll_s: float) -> Iterator[list[Signals]]:
    """The finished updates, each time the log has changed, the last time after `stop`."""
    size = -1
    while True:
        last = stop.is_set()
        now = log.path.stat().st_size if log.path.exists() else 0
        if now != size:
            size = now
            yield finished(log.read())
        if last:
            return
        stop.wait(poll_s)
