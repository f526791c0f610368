"""`docs/claims.md` and its page of curves, from the kept data alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined

from claims.judge import FAILS, HOLDS, OPEN, PARTLY, Evidence, judge_all
from claims.readings import Reading, read
from claims.results import Result
from claims.study import ROOT, Cell, Study, cells, command_line, config_of
from miles_mixprec.config import to_mapping
from miles_mixprec.guard.plots import line_plot
from miles_mixprec.guard.report import CURVES, Plot, comparison_plots, group_series

OVERVIEW = ("Reward", "Sampler-trainer KL", "Format errors")
_TAGS = {HOLDS: "good", PARTLY: "note", FAILS: "bad", OPEN: "soft"}

_loader = ChoiceLoader([FileSystemLoader(Path(__file__).parent), PackageLoader("miles_mixprec.guard", "")])
_pages = Environment(loader=_loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
_texts = Environment(loader=_loader, autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


@dataclass(frozen=True)
class Row:
    """Readings of one arm on one fleet (and in one regime), over the seeds."""

    label: str
    cells: list[str]


ROW_HEADS = (
    "seeds",
    "collapse at",
    "mode",
    "reward, start to end",
    "pass@1",
    "pass@4",
    "KL",
    "KL, end / start",
    "tail ratio, highest",
    "masked",
    "gradient norm",
    "entropy, start to end",
    "format errors, end",
    "response tokens, end",
    "staleness",
    "s per update",
)


def write_reports(study: Study, results: Sequence[Result]) -> list[Path]:
    """Write `<study>.md` and `<study>.html` into the study's docs folder; return their paths."""
    evidence = Evidence(study, results, [read(result, study.limits) for result in results])
    known = cells(study)
    config = results[0].config if results and results[0].config else to_mapping(config_of(study, known[0]))
    pools = config["fleet"]["pools"]
    values = {
        "study": study,
        "done": len(results),
        "cells": len(known),
        "judgements": judge_all(evidence) if len(study.arms) > 1 else [],
        "heads": ROW_HEADS,
        "rows": rows(evidence),
        "pools": pool_kl(evidence),
        "config": config,
        "dequantized": [name for name, pool in pools.items() if pool["execution"] == "dequantized"],
        "commands": [command_line(study, cell) for cell in known],
        "tags": _TAGS,
    }
    sections = {"All arms": overview_plots(evidence), **{arm: arm_plots(evidence, arm) for arm in study.arms}}
    page = _pages.get_template("page_of_curves.html").render(**values, sections=sections)
    text = _texts.get_template("claims.md.j2").render(**values)
    docs = ROOT / study.docs
    docs.mkdir(parents=True, exist_ok=True)
    paths = [docs / f"{study.name}.md", docs / f"{study.name}.html"]
    for path, content in zip(paths, (text, page), strict=True):
        path.write_text(content)
    return paths


def groups(evidence: Evidence) -> dict[tuple[str, str, str], list[Reading]]:
    """Readings by arm, fleet and regime, in the study's order."""
    found: dict[tuple[str, str, str], list[Reading]] = {}
    for cell in cells(evidence.study):
        found.setdefault((cell.arm, cell.fleet, cell.regime), [])
    for reading in evidence.readings:
        found[_key(reading.cell)].append(reading)
    return {key: readings for key, readings in found.items() if readings}


def rows(evidence: Evidence) -> list[Row]:
    return [Row(_label(key), _cells(readings)) for key, readings in groups(evidence).items()]


def pool_kl(evidence: Evidence) -> list[tuple[str, str]]:
    """Mean KL of each pool, by arm and fleet."""
    table = []
    for key, readings in groups(evidence).items():
        pools = sorted({name for r in readings for name in r.kl_by_pool})
        means = {name: fmean(r.kl_by_pool[name] for r in readings if name in r.kl_by_pool) for name in pools}
        table.append((_label(key), ", ".join(f"{name} {kl:.2e}" for name, kl in means.items())))
    return table


def _cells(readings: Sequence[Reading]) -> list[str]:
    collapses = [
        "-" if r.collapse is None else f"{r.collapse}{', recovered' if r.recovered else ''}" for r in readings
    ]
    modes = sorted({r.mode for r in readings if r.mode})
    return [
        str(len(readings)),
        "; ".join(collapses),
        ", ".join(modes) or "-",
        f"{_mean([r.reward[0] for r in readings])} to {_mean([r.reward[1] for r in readings])}",
        _mean([r.pass_1[1] for r in readings if r.pass_1]),
        _mean([r.pass_4[1] for r in readings if r.pass_4]),
        _mean([r.kl for r in readings], ".1e"),
        _mean([r.kl_growth for r in readings], ".1f"),
        _mean([r.tail_ratio for r in readings]),
        _mean([r.masked for r in readings], ".2%"),
        _mean([r.grad_norm for r in readings]),
        f"{_mean([r.entropy[0] for r in readings])} to {_mean([r.entropy[1] for r in readings])}",
        _mean([r.format_errors[1] for r in readings], ".0%"),
        _mean([r.response_tokens[1] for r in readings], ".0f"),
        _mean([r.staleness for r in readings], ".1f"),
        _mean([r.seconds for r in readings], ".1f"),
    ]


def _mean(values: Sequence[float | None], form: str = ".2f") -> str:
    known = [v for v in values if v is not None]
    return format(fmean(known), form) if known else "-"


# --- curves --------------------------------------------------------------------------------------------------------


def overview_plots(evidence: Evidence) -> list[Plot]:
    """The curves that tell a collapse, every arm in one plot, one plot per fleet."""
    plots = []
    for fleet in evidence.study.fleets:
        by_arm = {arm: runs for arm in evidence.study.arms if (runs := evidence.runs(arm, fleet))}
        for plot in comparison_plots(by_arm, [c for c in CURVES if c.title in OVERVIEW]):
            plots.append(Plot(f"{plot.title}, {fleet}", plot.note, plot.svg))
    return plots


def arm_plots(evidence: Evidence, arm: str) -> list[Plot]:
    """Every curve of one arm with a line per fleet, and its held-out evaluations. Regimes count as fleets here."""
    by_fleet: dict[str, list[Result]] = {}
    for result in evidence.results:
        if result.cell.arm == arm:
            by_fleet.setdefault(" ".join(filter(None, (result.cell.fleet, result.cell.regime))), []).append(result)
    plots = comparison_plots({label: [r.signals for r in results] for label, results in by_fleet.items()})
    for title, name in (("Held-out pass@1", "pass_1"), ("Held-out pass@4", "pass_4")):
        lines = [
            group_series(label, [{line.update: getattr(line, name) for line in r.evals} for r in results])
            for label, results in by_fleet.items()
        ]
        if series := [line for line in lines if line.x]:
            plots.append(Plot(title, "on BF16 engines", line_plot(series)))
    return plots


def _key(cell: Cell) -> tuple[str, str, str]:
    return cell.arm, cell.fleet, cell.regime


def _label(key: tuple[str, str, str]) -> str:
    arm, fleet, regime = key
    return f"{arm}, {fleet}" + (f", {regime}" if regime else "")
