"""The traces of an example: each text token by token, by who wrote it, and what both models thought.

In a terminal a source is a colour, elsewhere a pair of brackets. Where the sources of tokens come
from is in `records.TokenTrace`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.config import JobError
from pipeline.report.reading import read_example, read_schema
from pipeline.report.settings import SETTING_KEYS, Line, by_setting
from pipeline.report.table import readable
from pipeline.results.rows import PARAMETER_COLUMNS, strategy_of
from pipeline.results.writer import read_rows

Decode = Callable[[list[int]], str]
"""Token ids to text; a tokenizer stays outside."""

_COLUMNS = (
    *("example_id", "repeat", "strategy", *PARAMETER_COLUMNS, *SETTING_KEYS),
    *("prompt", "references", "output_ids", "finish_reason", "error", "trace"),
)
_LOOKS = {
    "draft": ("green", "", ""),
    "residual": ("bold red", "[", "]"),
    "bonus": ("bold cyan", "{", "}"),
    "verifier": ("bold magenta", "<", ">"),
}
"""Of each source its style in a terminal, and what stands around its tokens without colours."""

_DEFERRED = "underline"
_HEADERS = (
    *("token", "source", "deferred", "accepted", "drafter\nconfidence", "verifier\nconfidence"),
    *("drafter\nmax", "verifier\nmax", "D_TV"),
)
_NUMBERS = (
    "drafter_confidence",
    "verifier_confidence",
    "drafter_max",
    "verifier_max",
    "total_variation",
)


@dataclass(frozen=True)
class TracedRow:
    """One row of an example with its trace; `setting` is its number, and `setting_text` its words."""

    setting: int
    setting_text: str
    row: Line

    @property
    def label(self) -> str:
        """The strategy as people write it."""
        return strategy_of(self.row).label


def find_traces(
    output: Path, example_id: str, strategy: str, settings: Sequence[int] = (), repeat: int = 0
) -> list[TracedRow]:
    """The rows of an example under a strategy, in job order.

    Args:
        strategy: a label, `spec_cascade.opt(alpha=0.2)`, or a `use:` name with all its parameters.
        settings: numbers of settings in job order, from 0; none given are all.

    Raises:
        JobError: the run has no traces, or no such example, strategy, setting or repeat.
    """
    if "trace" not in read_schema(output).names:
        raise JobError(
            f"{output} has no traces; set `trace: true` in the job and run it into a new folder"
        )
    rows = read_example(output, example_id, list(_COLUMNS)).to_pylist()
    if not rows:
        known = read_rows(output, ["example_id"]).column("example_id").unique().to_pylist()
        raise JobError(_unknown("--example", example_id, known))
    _check_strategy(strategy, rows)
    _check_repeat(repeat, rows)
    groups = by_setting(rows)
    for number in settings:
        if not 0 <= number < len(groups):
            said = ", ".join(f"{n} ({group.text})" for n, group in enumerate(groups) if group.text)
            raise JobError(f"--setting is {number}; the run's settings are {said or 'only 0'}")
    return [
        TracedRow(number, group.text, row)
        for number, group in enumerate(groups)
        if not settings or number in settings
        for row in group.lines
        if row["repeat"] == repeat and strategy in (row["strategy"], strategy_of(row).label)
    ]


def print_traces(traces: Sequence[TracedRow], decode: Decode, console: Console) -> None:
    """Print the prompt and references, then for each trace its text and a table of its tokens."""
    console = readable(console)
    first = traces[0].row
    console.print(Text.assemble(("example   ", "bold"), first["example_id"]))
    console.print(Text.assemble(("prompt    ", "bold"), first["prompt"] or "-"))
    for reference in first["references"] or []:
        console.print(Text.assemble(("reference ", "bold"), reference))
    for traced in traces:
        console.print()
        _print_trace(traced, decode, console)


def token_pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """What each token adds to the text; the pieces together are the whole text.

    A character that several tokens spell belongs to the one that completes it.
    """
    if not ids:
        return []
    whole = decode(list(ids))
    ends = [0]
    for length in range(1, len(ids)):
        ends.append(max(ends[-1], _agreement(decode(list(ids[:length])), whole)))
    return [whole[start:end] for start, end in pairwise([*ends, len(whole)])]


def coloured_text(pieces: Sequence[str], trace: Sequence[Line], colours: bool) -> Text:
    """A text by who wrote it; deferred tokens are underlined, without colours followed by `'`."""
    text = Text()
    for piece, token in zip(pieces, trace, strict=True):
        style, left, right = _LOOKS[token["source"]]
        if colours:
            text.append(piece, f"{style} {_DEFERRED}" if token["deferred"] else style)
        else:
            bare = piece.lstrip(" ")
            mark = "'" if token["deferred"] else ""
            text.append(f"{piece[: len(piece) - len(bare)]}{left}{bare}{right}{mark}")
    return text


def token_table(pieces: Sequence[str], trace: Iterable[Line]) -> Table:
    """A line for each token: who wrote it, and what both models thought there."""
    table = Table(header_style="bold")
    for number, header in enumerate(_HEADERS):
        table.add_column(header, justify="right" if number >= len(_HEADERS) - 5 else "left")
    for piece, token in zip(pieces, trace, strict=True):
        table.add_row(
            Text(repr(piece)),
            Text(token["source"], _LOOKS[token["source"]][0]),
            *("yes" if token[name] else "" for name in ("deferred", "accepted")),
            *("-" if token[name] is None else f"{token[name]:.3f}" for name in _NUMBERS),
        )
    return table


def _agreement(text: str, whole: str) -> int:
    """How many characters the beginnings share; a half-spelt one is not shared."""
    pairs = enumerate(zip(text, whole, strict=False))
    return next(
        (place for place, (one, other) in pairs if one != other), min(len(text), len(whole))
    )


def _print_trace(traced: TracedRow, decode: Decode, console: Console) -> None:
    row, colours = traced.row, console.color_system is not None and not console.no_color
    words = [traced.label, traced.setting_text, f"repeat {row['repeat']}" if row["repeat"] else ""]
    console.print(Text(" · ".join(word for word in words if word), "bold"))
    if row["error"] is not None:
        console.print(Text(f"error: {row['error']}", "red"))
    trace = row["trace"] or []
    if not trace:
        return
    pieces = token_pieces(row["output_ids"], decode)
    console.print(coloured_text(pieces, trace, colours))
    console.print(_legend(trace, colours))
    console.print(token_table(pieces, trace))


def _legend(trace: Sequence[Line], colours: bool) -> Text:
    """Who wrote how many tokens, each source as it looks in the text."""
    counted = Counter(token["source"] for token in trace)
    legend = Text()
    for source, (style, left, right) in _LOOKS.items():
        name = Text(source, style) if colours else Text(f"{left}{source}{right}")
        legend.append_text(name).append(f" {counted[source]}   ")
    deferred = sum(token["deferred"] for token in trace)
    name = Text("deferred", _DEFERRED) if colours else Text("deferred'")
    return legend.append_text(name).append(f" {deferred}")


def _check_strategy(strategy: str, rows: Sequence[Line]) -> None:
    labels = dict.fromkeys(strategy_of(row).label for row in rows)
    known = list(dict.fromkeys([*(row["strategy"] for row in rows), *labels]))
    if strategy not in known:
        raise JobError(_unknown("--strategy", strategy, known))


def _check_repeat(repeat: int, rows: Sequence[Line]) -> None:
    repeats = {row["repeat"] for row in rows}
    if repeat not in repeats:
        raise JobError(f"--repeat is {repeat}; the run's repeats are 0 to {max(repeats)}")


def _unknown(option: str, given: str, known: Sequence[Any]) -> str:
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.0)
    remedy = f"did you mean '{near[0]}'?" if near else "it has none"
    return f"{option} is '{given}', which the run does not have; {remedy}"
