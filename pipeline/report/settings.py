"""Decoding settings in words, and lines of a table grouped by their setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SETTING_KEYS = (
    "job",
    "block_size",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "drafter_temperature",
    "drafter_top_k",
    "drafter_top_p",
    "drafter_min_p",
    "bonus",
)
"""The columns that tell two settings of a run apart."""

Line = Mapping[str, Any]
"""A row, or a line of the summary: values by column."""


@dataclass(frozen=True)
class SettingGroup:
    """The lines of one setting. `text` says what sets it apart, in words; empty if it is the only."""

    text: str
    lines: tuple[Line, ...]


def by_setting(lines: Iterable[Line]) -> list[SettingGroup]:
    """One group for each setting, in the order in which they come."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in SETTING_KEYS), []).append(line)
    differing = _differing([group[0] for group in groups.values()])
    return [SettingGroup(_words(group[0], differing), tuple(group)) for group in groups.values()]


def shared_setting(lines: Sequence[Line]) -> str:
    """The setting that all lines share, for a title: `demo · block size 5 · temperature 1`.

    What is not set, or is the usual, goes without saying.
    """
    differing = _differing(lines)
    shared = [name for name in SETTING_KEYS if name not in differing]
    return _words(lines[0], [name for name in shared if _is_said(name, lines[0])]) if lines else ""


def _differing(lines: Sequence[Line]) -> list[str]:
    return [name for name in SETTING_KEYS if len({line[name] for line in lines}) > 1]


def _is_said(name: str, line: Line) -> bool:
    return line[name] is not None and (name, line[name]) != ("bonus", "verifier")


def _words(line: Line, names: Iterable[str]) -> str:
    return " · ".join(_setting(name, line[name]) for name in names)


def _setting(name: str, value: Any) -> str:
    if name == "job":
        return str(value)
    if value is None:
        value = "as the verifier's" if name.startswith("drafter") else "none"
    return f"{name.replace('_', ' ')} {value if isinstance(value, str) else f'{value:g}'}"
