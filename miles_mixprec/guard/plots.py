"""Line plots as inline SVG that take the page's text colour, so one file reads in light and dark."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

matplotlib.use("svg")

# Of middling lightness: readable on white and on near-black.
PALETTE = ("#2f7fe0", "#e8710a", "#12a67c", "#a25ae0", "#d9415d", "#b8930f", "#1596ad", "#d152a4")
DECADES = 1e5  # that a log axis shows below its highest value
TEXT = "#010203"  # stands for the page's text colour until the SVG is written
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["system-ui", "Segoe UI", "Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    **dict.fromkeys(["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"], TEXT),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
}


@dataclass(frozen=True)
class Series:
    """A curve over updates; None is a gap. `low` and `high` draw a band, as of the spread over seeds."""

    label: str
    x: Sequence[int]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    color: str | None = None  # None: by position in PALETTE


def line_plot(
    series: Sequence[Series], *, log: bool = False, percent: bool = False, marks: Mapping[str, int] | None = None
) -> str:
    """An `<svg>` of `series`. `marks` are labelled updates, drawn as vertical lines. Points are few enough to show."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": " ".join(s.label for s in series)}):
        figure = Figure(figsize=(4.4, 2.6), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        axes.grid(color=TEXT, alpha=0.12, linewidth=0.6)
        for index, s in enumerate(series):
            color = s.color or PALETTE[index % len(PALETTE)]
            marker = "." if len(s.x) <= 60 else ""
            axes.plot(s.x, _gaps(s.y), color=color, label=s.label, linewidth=1.5, marker=marker)
            if s.low:
                axes.fill_between(s.x, _gaps(s.low), _gaps(s.high), color=color, alpha=0.16, linewidth=0)
        for label, update in (marks or {}).items():
            axes.axvline(update, color=TEXT, linewidth=0.8, linestyle=":")
            axes.annotate(label, (update, 1), (3, -8), xycoords=("data", "axes fraction"), textcoords="offset points")
        if log and _span(series) > 10:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set_ylim(bottom=max(low, high / DECADES))
        elif percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1))
            axes.set_ylim(bottom=0)
        else:
            axes.ticklabel_format(axis="y", useOffset=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("update")
        if len(series) > 1:
            figure.legend(
                loc="outside upper left", frameon=False, ncols=min(len(series), 4), handlelength=1.4, fontsize=9
            )
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(["Date", "Creator", "Format", "Type"]))
    svg = file.getvalue()
    svg = re.sub("<[^>]*>", _hundredths, svg[svg.index("<svg") :])
    return svg.replace(TEXT, "currentColor")


def _hundredths(tag: re.Match[str]) -> str:
    """Coordinates to hundredths of a point, which halves the file. Text stands between tags and stays."""
    return re.sub(r"(\.\d\d)\d+", r"\1", tag[0])


def _span(series: Sequence[Series]) -> float:
    """Largest over smallest positive value."""
    values = [v for s in series for v in s.y if v and 0 < v < math.inf]
    return max(values) / min(values) if values else 1.0


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if v is None else v for v in values]
