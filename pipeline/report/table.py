"""The summary as tables for people: a line for each strategy, under its setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.report.settings import Line, by_setting, shared_setting
from pipeline.results.errors import ErrorTally
from pipeline.results.schema import metric_names

_RATES = {
    "verifier_calls_per_token": "verifier calls\n/ token",
    "verifier_tokens_per_token": "scored tokens\n/ token",
    "drafter_calls_per_token": "drafter calls\n/ token",
    "acceptance": "accepted\n/ drafted",
    "deferral_rate": "deferred",
}
_DEFERRAL_HEADERS = (
    "judged",
    "deferred",
    "rejected\n/ judged",
    "expected\n(Lemma 3)",
    "deferral risk\n(eq. 3)",
    "speculative risk\n(eq. 8)",
)
_PLAIN_WIDTH = 240

Cells = Callable[[Line], list[str]]


def summary_table(summary: pa.Table) -> Table:
    """A line for each strategy: quality, calls a token, acceptance, rows and errors."""
    metrics = {name: _digits(summary, name) for name in metric_names(summary.schema)}

    def cells(line: Line) -> list[str]:
        quality = [_number(line[name], digits) for name, digits in metrics.items()]
        rates = [_number(line[name], 3) for name in _RATES]
        return [*quality, *rates, str(line["rows"]), _errors(line["errors"])]

    lines = summary.to_pylist()
    headers = [*metrics, *_RATES.values(), "rows", "errors"]
    return _table(shared_setting(lines), headers, lines, cells)


def deferral_table(summary: pa.Table) -> Table | None:
    """A line for each strategy that judges drafts: deferral, rejection and risk a judged position.

    None if no strategy does. What the columns are is in `deferral.DEFERRAL`.
    """
    lines = [line for line in summary.to_pylist() if line["judged"]]
    if not lines:
        return None
    return _table("Deferral and its risk", _DEFERRAL_HEADERS, lines, _deferral_cells)


def print_summary(summary: pa.Table, console: Console | None = None) -> None:
    """Print the tables: coloured in a terminal, else plain and not cut to a terminal's width."""
    console = readable(console or Console())
    console.print(summary_table(summary))
    deferral = deferral_table(summary)
    if deferral:
        console.print(deferral)


def print_errors(tally: ErrorTally, console: Console) -> None:
    """Print how many rows have which errors, and with what one of each says."""
    said = f"Errors: {tally.errors} of {tally.rows} rows"
    console.print(said + (f": {tally.by_code()}" if tally.errors else ""), soft_wrap=True)
    for code, _ in tally.codes.most_common():
        console.print(f"  {code}: {escape(tally.messages[code])}", soft_wrap=True, highlight=False)
    if tally.skipped:
        console.print(f"Skipped: {tally.skipped} rows, whose prompts are too long", soft_wrap=True)


def readable(console: Console) -> Console:
    """The console, or where it is no terminal a plain one that is wide enough for a table."""
    if console.is_terminal:
        return console
    return Console(file=console.file, width=_PLAIN_WIDTH, no_color=True)


def _table(title: str, headers: Sequence[str], lines: Sequence[Line], cells: Cells) -> Table:
    """Strategies by setting; where there are several settings, each has a heading."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("strategy", overflow="fold")
    for header in headers:
        table.add_column(header, justify="right")
    for group in by_setting(lines):
        table.add_section()
        if group.text:
            table.add_row(group.text, style="bold")
        for line in group.lines:
            table.add_row(line["label"], *cells(line))
    return table


def _deferral_cells(line: Line) -> list[str]:
    return [
        str(line["judged"]),
        _number(line["deferral_rate"], 3),
        _number(line["rejection_rate"], 3),
        _expected_rejection(line),
        _number(line["deferral_risk"], 3),
        _number(line["speculative_risk"], 3),
    ]


def _expected_rejection(line: Line) -> str:
    """The prediction, with the standard error of its difference to what was counted."""
    expected = _number(line["expected_rejection_rate"], 3)
    error = line["rejection_gap_error"]
    return expected if error is None else f"{expected} ± {error:.3f}"


def _digits(summary: pa.Table, metric: str) -> int:
    unit = (summary.schema.field(metric).metadata or {}).get(b"unit", b"")
    return 2 if unit == b"0 to 100" else 3


def _number(value: Any, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _errors(count: int) -> str:
    return f"[red]{count}[/red]" if count else "0"
