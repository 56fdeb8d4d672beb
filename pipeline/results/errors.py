"""How many rows have which errors, and when there are too many of them to go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import JobError
from pipeline.records import SKIPPED
from pipeline.results.writer import shard_files

COLUMNS = ["error_code", "error"]
ENOUGH_EXAMPLES = 100
"""Fewer say little of the others."""


class ErrorShareError(JobError):
    """More rows have errors than the job allows: says how many, which, and how to go on."""


@dataclass
class ErrorTally:
    """Rows and their errors by code, with one message for each. Skipped rows have none."""

    rows: int = 0
    skipped: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)

    @property
    def errors(self) -> int:
        """How many rows have an error."""
        return self.codes.total()

    def add(self, rows: pa.Table) -> None:
        """Count the rows of a table that has the two columns of errors."""
        self.rows += rows.num_rows
        pairs: Iterable[tuple[str | None, str | None]] = zip(
            *(rows.column(name).to_pylist() for name in COLUMNS), strict=True
        )
        for code, message in pairs:
            if code == SKIPPED:
                self.skipped += 1
            elif code is not None:
                self.codes[code] += 1
                self.messages.setdefault(code, message or "")

    def by_code(self) -> str:
        """As people read it: the most frequent first."""
        return ", ".join(f"{count} {code}" for code, count in self.codes.most_common())


def tally_of(output: Path) -> ErrorTally:
    """The errors of all rows that a run has written."""
    tally = ErrorTally()
    for path in shard_files(output):
        tally.add(pq.ParquetFile(path).read(columns=COLUMNS))
    return tally


def check_share(tally: ErrorTally, limit: float) -> None:
    """Raises `ErrorShareError` if the share of rows with errors is above the limit."""
    if not tally.rows or tally.errors <= limit * tally.rows:
        return
    code, count = tally.codes.most_common(1)[0]
    raise ErrorShareError(
        f"max_error_share is {limit:g}, but {tally.errors} of {tally.rows} rows have errors, a share "
        f"of {tally.errors / tally.rows:.2f}; the most frequent is {code} ({count} rows), for example "
        f'"{tally.messages[code]}". What is written is kept: mend the job, or run the same command '
        "with --set max_error_share=1 to carry on"
    )
