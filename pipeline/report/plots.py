"""The cost-quality frontier: quality against verifier calls per emitted token, one curve a rule.

Drafter and verifier are reference points; the dashed line is the verifier's quality, so whatever
is at least as good and lies to the left of the verifier is a gain. Each setting has a panel of its own,
all with the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from pipeline.report.settings import Line, SettingGroup, by_setting, shared_setting
from pipeline.results.rows import strategy_of
from pipeline.results.schema import higher_is_better

COST = "verifier_calls_per_token"

# Okabe and Ito's colours, told apart by all common kinds of colour blindness. Markers and line
# styles differ too: no two of 64 curves look alike, and the picture survives a grey printer.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999933", "#882255")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
_LINES = ("-", "--", ":", "-.")
_REFERENCES = {"drafter": "h", "verifier": "*", "spec_decode": "d"}
"""Strategies without a trade-off to make: points in black, not curves."""
_MANY_CURVES = 8
"""With more curves than these only their ends are annotated."""
_MOST_COLUMNS = 3
_PANEL_INCHES = (5.0, 4.1)
_LONE_PANEL_INCHES = (7.0, 5.2)
_LEGEND_INCHES = (3.2, 0.24)
"""Its width, and the height of an entry."""


@dataclass(frozen=True)
class Look:
    """How a curve is drawn, the same in every panel."""

    colour: str
    marker: str
    line: str

    @classmethod
    def of(cls, number: int) -> Look:
        """The look of the curve with this number; all looks differ up to 64 curves."""
        turn = number // len(_COLOURS)
        return cls(
            _COLOURS[number % len(_COLOURS)],
            _MARKERS[(number + turn) % len(_MARKERS)],
            _LINES[turn % len(_LINES)],
        )


def plot_frontier(summary: pa.Table, metric: str, path: Path) -> Path:
    """Draw the frontier of one metric as a PNG, one panel a setting. Returns its path."""
    lines = summary.to_pylist()
    panels = by_setting(lines) or [SettingGroup("", ())]
    names = [name for name in dict.fromkeys(curve_name(line) for line in lines) if name]
    looks = {name: Look.of(number) for number, name in enumerate(names)}
    figure, axes = _panels(len(panels), len(looks))
    for panel, place in zip(panels, axes, strict=True):
        _draw_panel(place, panel.lines, metric, looks)
        place.set_title(panel.text, fontsize=9, loc="left")
    figure.suptitle(f"{shared_setting(lines)} · {metric}", fontsize=11, x=0.01, ha="left")
    better = "higher" if higher_is_better(summary.schema.field(metric)) else "lower"
    figure.supxlabel("verifier calls per emitted token (lower is better)", fontsize=10)
    figure.supylabel(f"{metric} ({better} is better)", fontsize=10)
    _add_legend(figure)
    figure.savefig(path, dpi=150)
    return path


def curve_name(line: Line) -> str | None:
    """The strategy without the parameter that runs along its curve; None for a reference point.

    That parameter is alpha, and BiLD's rollback.
    """
    strategy = strategy_of(line)
    if strategy.use in _REFERENCES:
        return None
    return replace(strategy, alpha=None, rollback=None).label


def _panels(count: int, curves: int) -> tuple[Figure, list[Axes]]:
    """A figure with one set of axes for each panel, all alike, and room for the legend."""
    columns = 2 if count == 4 else min(count, _MOST_COLUMNS)
    rows = math.ceil(count / columns)
    width, height = _LONE_PANEL_INCHES if count == 1 else _PANEL_INCHES
    legend_width, entry_height = _LEGEND_INCHES
    legend_height = entry_height * (curves + len(_REFERENCES) + 2)
    size = (width * columns + legend_width, max(height * rows, legend_height))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for unused in grid[count:]:
        unused.remove()
    for axes in grid[max(0, count - columns) : count]:
        axes.tick_params(labelbottom=True)
    return figure, list(grid[:count])


def _draw_panel(axes: Axes, lines: Sequence[Line], metric: str, looks: dict[str, Look]) -> None:
    known = [line for line in lines if line[metric] is not None and line[COST] is not None]
    _draw_references(axes, known, metric)
    for name, look in looks.items():
        curve = sorted((line for line in known if curve_name(line) == name), key=_along)
        if curve:
            _draw_curve(axes, name, curve, metric, look, ends_only=len(looks) > _MANY_CURVES)
    axes.set_xlim(left=-0.03)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _along(line: Line) -> float:
    """Where a point stands on its curve; larger defers less."""
    value = line["rollback"] if line["rollback"] is not None else line["alpha"]
    return 0.0 if value is None else float(value)


def _draw_curve(
    axes: Axes, name: str, curve: list[Line], metric: str, look: Look, *, ends_only: bool
) -> None:
    axes.plot(
        [line[COST] for line in curve],
        [line[metric] for line in curve],
        label=name,
        color=look.colour,
        marker=look.marker,
        linestyle=look.line if len(curve) > 1 else "none",
        markersize=6,
        linewidth=1.6,
        alpha=0.9,
    )
    for line in [curve[0], *curve[1:][-1:]] if ends_only else curve:
        if line["alpha"] is not None or line["rollback"] is not None:
            _annotate(axes, f"{_along(line):g}", (line[COST], line[metric]), look.colour)


def _annotate(axes: Axes, text: str, place: tuple[float, float], colour: str) -> None:
    """A parameter over its point, in a darker colour of its curve and with a halo over the lines."""
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


def _draw_references(axes: Axes, lines: Sequence[Line], metric: str) -> None:
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


def _add_legend(figure: Figure) -> None:
    """One legend for all panels."""
    entries = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if entries:
        figure.legend(
            entries.values(), entries, loc="outside right upper", frameon=False, fontsize=8.5
        )
