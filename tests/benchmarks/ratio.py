"""What a benchmark reports."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


class Skipped(Exception):  # noqa: N818 - nothing went wrong
    """A benchmark cannot run here; the message says in one sentence what it needs."""


@dataclass(frozen=True)
class Ratio:
    """A quantity over another, measured side by side several times."""

    of: str
    values: Sequence[float]
    target: str

    def cells(self) -> tuple[str, ...]:
        """As a row of the table."""
        middle = statistics.median(self.values)
        ends = (min(self.values), max(self.values))
        return (
            self.of,
            f"{middle:.3g}",
            *(f"{end:.3g}" for end in ends),
            str(len(self.values)),
            self.target,
        )
