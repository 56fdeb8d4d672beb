"""The summary as a table for people."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from pipeline.report.summary import SETTING_KEYS
from pipeline.results.schema import metric_names

_RATES = {
    "verifier_calls_per_token": "verifier calls\n/ token",
    "verifier_tokens_per_token": "scored tokens\n/ token",
    "drafter_calls_per_token": "drafter calls\n/ token",
    "acceptance": "accepted\n/ drafted",
    "deferral_rate": "deferred",
}
_PLAIN_WIDTH = 160


def summary_table(summary: pa.Table) -> Table:
    """A line for each strategy: quality, calls a token, acceptance, rows and errors."""
    table = Table(title=setting_text(summary), title_justify="left", header_style="bold")
    table.add_column("strategy", overflow="fold")
    metrics = metric_names(summary.schema)
    for header in [*metrics, *_RATES.values(), "rows", "errors"]:
        table.add_column(header, justify="right")
    for line in summary.to_pylist():
        quality = [_number(line[name], _digits(summary, name)) for name in metrics]
        rates = [_number(line[name], 3) for name in _RATES]
        table.add_row(line["label"], *quality, *rates, str(line["rows"]), _errors(line["errors"]))
    return table


def print_summary(summary: pa.Table, console: Console | None = None) -> None:
    """Print the table: coloured in a terminal, else plain and not cut to a terminal's width."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=_PLAIN_WIDTH, no_color=True)
    console.print(summary_table(summary))


def setting_text(summary: pa.Table) -> str:
    """The setting that the lines share, for a title: `demo · block size 5 · temperature 1`."""
    shared = {name: set(summary.column(name).to_pylist()) for name in SETTING_KEYS}
    words = [_setting(name, values.pop()) for name, values in shared.items() if len(values) == 1]
    return " · ".join(word for word in words if word)


def _setting(name: str, value: Any) -> str:
    """A setting in words; what is not set, or is the usual, goes without saying."""
    if value is None or (name == "bonus" and value == "verifier"):
        return ""
    if name == "job":
        return str(value)
    shown = value if isinstance(value, str) else f"{value:g}"
    return f"{name.replace('_', ' ')} {shown}"


def _digits(summary: pa.Table, metric: str) -> int:
    unit = (summary.schema.field(metric).metadata or {}).get(b"unit", b"")
    return 2 if unit == b"0 to 100" else 3


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _errors(count: int) -> str:
    return f"[red]{count}[/red]" if count else "0"
