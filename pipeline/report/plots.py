"""The cost-quality frontier: quality against verifier calls per emitted token, one curve a rule.

Drafter and verifier are reference points; the dashed line is the verifier's quality, so whatever
lies on or above it and to the left of the verifier is a gain.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from pipeline.report.table import setting_text
from pipeline.results.schema import higher_is_better

COST = "verifier_calls_per_token"

# Okabe and Ito's colours, told apart by all common kinds of colour blindness; the markers
# differ too, so that the picture survives a grey printer.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999933", "#882255")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
_REFERENCES = {"drafter": "h", "verifier": "*", "spec_decode": "d"}
"""Strategies without a trade-off to make: points in black, not curves."""

Line = dict[str, Any]


def plot_frontier(summary: pa.Table, metric: str, path: Path) -> Path:
    """Draw the frontier of one metric as a PNG. Returns its path."""
    figure = Figure(figsize=(9.5, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines = [
        line for line in summary.to_pylist() if line[metric] is not None and line[COST] is not None
    ]
    _draw_references(axes, lines, metric)
    for number, (name, curve) in enumerate(_curves(lines).items()):
        _draw_curve(axes, name, curve, metric, number)
    _dress(axes, summary, metric)
    if lines:
        figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150)
    return path


def _curves(lines: list[Line]) -> dict[str, list[Line]]:
    """The lines of each rule, by alpha."""
    curves: dict[str, list[Line]] = {}
    for line in lines:
        if line["strategy"] not in _REFERENCES:
            curves.setdefault(_curve_name(line), []).append(line)
    return {name: sorted(curve, key=_alpha) for name, curve in curves.items()}


def _curve_name(line: Line) -> str:
    beta = line["beta"]
    return line["strategy"] if beta is None else f"{line['strategy']} (beta={beta})"


def _alpha(line: Line) -> float:
    return float(line["alpha"]) if line["alpha"] is not None else 0.0


def _draw_curve(axes: Axes, name: str, curve: list[Line], metric: str, number: int) -> None:
    colour = _COLOURS[number % len(_COLOURS)]
    axes.plot(
        [line[COST] for line in curve],
        [line[metric] for line in curve],
        label=name,
        color=colour,
        marker=_MARKERS[(number + number // len(_COLOURS)) % len(_MARKERS)],
        linestyle="-" if len(curve) > 1 else "none",
        markersize=6,
        linewidth=1.6,
        alpha=0.9,
    )
    for line in curve:
        if line["alpha"] is not None:
            _annotate(axes, f"{line['alpha']:g}", (line[COST], line[metric]), colour)


def _annotate(axes: Axes, text: str, place: tuple[float, float], colour: str) -> None:
    """An alpha over its point, in a darker colour of its curve and with a halo over the lines."""
    dark = tuple(0.7 * part for part in to_rgb(colour))
    axes.annotate(
        text,
        place,
        xytext=(0, 5),
        textcoords="offset points",
        ha="center",
        fontsize=7,
        color=dark,
        path_effects=[withStroke(linewidth=1.5, foreground="white")],
        zorder=4,
    )


def _draw_references(axes: Axes, lines: list[Line], metric: str) -> None:
    for line in lines:
        name = line["strategy"]
        if name not in _REFERENCES:
            continue
        axes.plot(
            [line[COST]],
            [line[metric]],
            label=name,
            marker=_REFERENCES[name],
            markersize=11,
            linestyle="none",
            color="black",
            zorder=5,
        )
        if name == "verifier":
            label = "verifier's quality"
            axes.axhline(line[metric], linestyle="--", label=label, color="0.4", linewidth=1)


def _dress(axes: Axes, summary: pa.Table, metric: str) -> None:
    better = "higher" if higher_is_better(summary.schema.field(metric)) else "lower"
    axes.set_title(f"{setting_text(summary)} · {metric}", fontsize=11, loc="left")
    axes.set_xlabel("verifier calls per emitted token (lower is better)")
    axes.set_ylabel(f"{metric} ({better} is better)")
    axes.set_xlim(left=-0.03)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
