"""A run's report: one HTML file that opens anywhere, offline.

    python -m miles_mixprec.guard.report RUN_DIR [RUN_DIR ...]

One folder gives `RUN_DIR/report.html`; several also give `comparison.html` beside the folder of the first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from miles_mixprec.config import Config
from miles_mixprec.errors import MixprecError
from miles_mixprec.guard import cost
from miles_mixprec.guard.checks import checks, declared_share, of_pool, sampled_share
from miles_mixprec.guard.collapse import Level, Verdict, judge
from miles_mixprec.guard.plots import TEXT, Series, line_plot
from miles_mixprec.guard.signals import (
    NOTHING,
    EvalLine,
    Mean,
    MetricsLog,
    PoolSignals,
    RunLogError,
    Signals,
    finished,
    read_config,
    total,
)

REPORT = "report.html"
COMPARISON = "comparison.html"


@dataclass(frozen=True)
class Run:
    """A run folder, read."""

    config: Config
    signals: list[Signals]
    evals: list[EvalLine]
    verdicts: list[Verdict]

    @property
    def label(self) -> str:
        return f"{self.config.algo.name} on {self.config.fleet.name}"


@dataclass(frozen=True)
class Plot:
    title: str
    note: str
    svg: str


def load_run(run_dir: str | os.PathLike[str]) -> Run:
    """Raises RunLogError when `run_dir` is not a run folder or no update of it has finished."""
    config = read_config(run_dir)
    lines = MetricsLog(run_dir).read()
    signals = finished(lines)
    if not signals:
        raise RunLogError(f"{run_dir}: no finished update in the run log yet; report once update 0 has ended")
    evals = [line for line in lines if isinstance(line, EvalLine)]
    return Run(config, signals, evals, judge(config.guard, signals))


def write_report(run_dir: str | os.PathLike[str], *, rates: Mapping[str, float] | None = None) -> Path:
    """Write `<run_dir>/report.html` and return its path.

    `rates` are benchmarked tokens per hour and engine, by pool; with them the table states busy cost beside billed.
    """
    run = load_run(run_dir)
    config, signals = run.config, run.signals
    onsets = _onsets(run.verdicts)
    page = _render(
        "report.html",
        title=run.label,
        subtitle=f"Run {config.run_id}, {len(signals)} of {config.updates} updates",
        dequantized=[name for name, pool in config.fleet.pools.items() if pool.execution == "dequantized"],
        facts=_facts(run),
        checks=checks(config, signals, run.verdicts),
        pools=config.fleet.pools,
        pool_rows=_pool_rows(run, rates or {}),
        cost_note=_COST_NOTE,
        marks=[f"{label} from update {update}" for label, update in onsets.items()],
        figures=run_plots(run, onsets),
    )
    return _write(Path(run_dir) / REPORT, page)


def write_comparison(run_dirs: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> Path:
    """Write one page of curves with a line per arm and fleet, and a band where several seeds share one."""
    groups: dict[str, list[Run]] = {}
    for run in map(load_run, run_dirs):
        groups.setdefault(run.label, []).append(run)
    page = _render(
        "comparison.html",
        title="Runs compared",
        facts=[(label, f"{len(runs)} run{'s' if len(runs) > 1 else ''}") for label, runs in groups.items()],
        figures=comparison_plots({label: [run.signals for run in runs] for label, runs in groups.items()}),
    )
    return _write(Path(path), page)


def write_all(run_dirs: Sequence[str]) -> Iterator[Path]:
    """Write the report of every run and, beside the folder of the first, a comparison if there are several."""
    yield from map(write_report, run_dirs)
    if len(run_dirs) > 1:
        yield write_comparison(run_dirs, Path(run_dirs[0]).resolve().parent / COMPARISON)


# --- plots ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A signal that is worth a plot; `by_pool` ones have a line per pool in a run's report."""

    title: str
    note: str
    value: Callable[[Any], float | None]  # of Signals and, by pool, of PoolSignals
    log: bool = False
    percent: bool = False
    by_pool: bool = False

    def plot(self, series: Sequence[Series], marks: Mapping[str, int] | None = None) -> Plot:
        return Plot(self.title, self.note, line_plot(series, log=self.log, percent=self.percent, marks=marks))


CURVES = (
    Curve("Reward", "mean of the samples", lambda s: s.reward.value),
    Curve("Sampler-trainer KL", "nats per token", lambda s: s.kl.value, log=True, by_pool=True),
    Curve("Tail ratio", "mass off the recorded head, sampler to trainer", lambda s: s.tail_ratio.value, log=True),
    Curve("Mass ratio", "mass on the recorded head or support, sampler to trainer", lambda s: s.mass_ratio.value),
    Curve(
        "Masked", "share of tokens with a weight out of bounds", lambda s: s.masked.value, percent=True, by_pool=True
    ),
    Curve("Staleness", "updates between sampling and training", lambda s: s.staleness.value, by_pool=True),
    Curve(
        "Format errors",
        "share of episodes that end on them",
        lambda s: s.format_errors.value,
        percent=True,
        by_pool=True,
    ),
    Curve("Maximum length", "share of samples that reach it", lambda s: s.length_capped.value, percent=True),
    Curve("Entropy", "nats per token", lambda s: s.entropy.value),
    Curve("Gradient norm", "", lambda s: s.grad_norm, log=True),
    Curve("Response length", "tokens per sample", lambda s: s.response_tokens.value),
)


def run_plots(run: Run, marks: Mapping[str, int]) -> list[Plot]:
    """Every plot of one run. `marks` are labelled updates."""
    signals, fleet = run.signals, run.config.fleet
    updates = [s.update for s in signals]
    plots = []
    for curve in CURVES:
        values = [curve.value(s) for s in signals]
        if all(v is None for v in values):
            continue
        series = [Series("all", updates, values, color=TEXT)]
        if curve.by_pool and len(fleet.pools) > 1:
            series = [
                Series(name, updates, [curve.value(s.pools[name]) if name in s.pools else None for s in signals])
                for name in fleet.pools
            ]
        if curve.title == "Reward" and run.evals:
            at = [e.update for e in run.evals]
            series.append(Series("held-out pass@1", at, [e.pass_1 for e in run.evals]))
            series.append(Series("held-out pass@4", at, [e.pass_4 for e in run.evals]))
        plots.append(curve.plot(series, marks))
    if lags := sorted({lag for s in signals for lag in s.kl_by_lag}):
        series = [Series(lag, updates, [s.kl_by_lag.get(lag, NOTHING).value for s in signals]) for lag in lags]
        svg = line_plot(series, log=True, marks=marks)
        plots.insert(2, Plot("KL by staleness", "nats per token, by updates between sampling and training", svg))
    svg = line_plot([Series("all", updates, [s.seconds for s in signals], color=TEXT)])
    plots.append(Plot("Duration", "seconds per update", svg))
    dollars = [sum(cost.billed(fleet, s.seconds).values()) for s in signals]
    if any(dollars):
        svg = line_plot([Series("all", updates, dollars, color=TEXT)])
        plots.append(Plot("Sampler cost", "$ per update, billed at the configured prices", svg))
    return plots


def comparison_plots(
    groups: Mapping[str, Sequence[Sequence[Signals]]], curves: Sequence[Curve] = CURVES
) -> list[Plot]:
    """Every curve with one line per group: the mean over its runs, and their range as a band."""
    plots = []
    for curve in curves:
        lines = [
            group_series(label, [{s.update: curve.value(s) for s in run} for run in runs])
            for label, runs in groups.items()
        ]
        if series := [line for line in lines if line.x]:
            plots.append(curve.plot(series))
    return plots


def group_series(label: str, runs: Sequence[Mapping[int, float | None]]) -> Series:
    """Mean and range over `runs`, each update -> value, at every update that some run has."""
    by_update: dict[int, list[float]] = {}
    for run in runs:
        for update, value in run.items():
            if value is not None:
                by_update.setdefault(update, []).append(value)
    at = sorted(by_update)
    mean, low, high = ([f(by_update[n]) for n in at] for f in (fmean, min, max))
    return Series(label, at, mean, low, high) if len(runs) > 1 else Series(label, at, mean)


# --- tables --------------------------------------------------------------------------------------------------------

_COST_NOTE = (
    "Billed is the whole pool as provisioned, idle or not, for the time of the run, at the pool's hourly price or the "
    "accelerator's list price. Busy is the tokens served at the pool's benchmarked rate; it needs a benchmark."
)


def _facts(run: Run) -> list[tuple[str, str]]:
    config, signals = run.config, run.signals
    seconds = sum(s.seconds for s in signals)
    started = datetime.fromtimestamp(signals[0].time - signals[0].seconds, timezone.utc)
    return [
        ("arm", config.algo.name),
        ("fleet", config.fleet.name),
        ("pools", ", ".join(config.fleet.pools)),
        ("model", Path(config.fleet.model).name),
        ("batch", f"{config.prompts_per_update} prompts x {config.samples_per_prompt}"),
        ("samples", f"{sum(s.reward.den for s in signals):,.0f}"),
        ("learning rate", f"{config.learning_rate:g}"),
        ("seed", str(config.seed)),
        ("started", f"{started:%Y-%m-%d %H:%M} UTC"),
        ("duration", f"{seconds / 60:.1f} min, {seconds / len(signals):.1f} s per update"),
    ]


def _pool_rows(run: Run, rates: Mapping[str, float]) -> list[tuple[str, list[str]]]:
    """One row per property, one cell per pool."""
    fleet, signals = run.config.fleet, run.signals
    pools = fleet.pools
    parts = {name: of_pool(signals, name) for name in pools}
    declared = {name: declared_share(run.config, name) for name in pools}
    sampled = {name: sampled_share(signals, name) for name in pools}
    tokens = {name: float(sum(p.tokens for p in parts[name])) for name in pools}
    billed = cost.billed(fleet, sum(s.seconds for s in signals))
    busy = cost.busy(fleet, tokens, rates)

    def row(head: str, cell: Callable[[str], str]) -> tuple[str, list[str]]:
        return head, [cell(name) for name in pools]

    def mean(head: str, form: str, part: Callable[[PoolSignals], Mean]) -> tuple[str, list[str]]:
        return row(head, lambda name: _cell(total(part(p) for p in parts[name]).value, form))

    return [
        row("view", lambda name: pools[name].view),
        row("KV cache", lambda name: pools[name].kv_cache_dtype),
        row("accelerators", lambda n: f"{pools[n].engines * pools[n].accelerators_per_engine} {pools[n].accelerator}"),
        row("engines x slots", lambda name: f"{pools[name].engines} x {pools[name].slots_per_engine}"),
        row("declared share", lambda name: f"{declared[name]:.1%}"),
        row("sampled share", lambda name: f"{sampled[name]:.1%}"),
        row("share error, points", lambda name: f"{(sampled[name] - declared[name]) * 100:+.1f}"),
        row("samples", lambda name: f"{sum(p.share.num for p in parts[name]):,.0f}"),
        row("response tokens", lambda name: f"{tokens[name]:,.0f}"),
        mean("reward", ".3f", lambda p: p.reward),
        mean("sampler-trainer KL, nats per token", ".2e", lambda p: p.kl),
        mean("masked tokens", ".2%", lambda p: p.masked),
        mean("staleness, updates", ".2f", lambda p: p.staleness),
        row("weight versions", lambda name: _span([v for p in parts[name] for v in p.versions])),
        mean("format errors", ".1%", lambda p: p.format_errors),
        mean("aborted episodes", ".1%", lambda p: p.aborted),
        row("billed, $", lambda name: _cell(billed[name], ".4f")),
        row("busy, $", lambda name: _cell(busy.get(name), ".4f")),
    ]


def _span(values: Sequence[int]) -> str:
    return f"{min(values)} to {max(values)}" if values else "-"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _onsets(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """First update of a warning and of a collapse."""
    first: dict[str, int] = {}
    for verdict in verdicts:
        if verdict.level >= Level.WARNING:
            first.setdefault(verdict.level.name.lower(), verdict.update)
    return first


# --- files ---------------------------------------------------------------------------------------------------------

_pages = Environment(loader=PackageLoader("miles_mixprec.guard", ""), autoescape=True, undefined=StrictUndefined)


def _render(template: str, **values: Any) -> str:
    return _pages.get_template(template).render(**values)


def _write(path: Path, text: str) -> Path:
    partial = path.with_suffix(".tmp")
    partial.write_text(text)
    partial.replace(path)
    return path


def main(run_dirs: Sequence[str]) -> None:
    if not run_dirs:
        raise SystemExit("usage: python -m miles_mixprec.guard.report RUN_DIR [RUN_DIR ...]")
    try:
        for path in write_all(run_dirs):
            print(path)
    except MixprecError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main(sys.argv[1:])
