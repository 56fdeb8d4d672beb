"""The report of a run: everything that is made from its row files alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from pipeline.report.plots import plot_frontier
from pipeline.report.summary import summarise
from pipeline.results.containment import check_contained, file_part
from pipeline.results.errors import ErrorTally, tally_of
from pipeline.results.schema import metric_names


@dataclass(frozen=True)
class Report:
    """The summary and where it is written. `plots` has one picture a metric, in job order."""

    summary: pa.Table = field(repr=False)
    errors: ErrorTally
    csv: Path
    parquet: Path
    plots: tuple[Path, ...]


def write_report(output: Path, allow_custom_code: bool = False) -> Report:
    """Summarise a run and write `summary.csv`, `summary.parquet` and `frontier-METRIC.png` into it.

    Args:
        allow_custom_code: whether metrics that are not built in may be loaded, which runs their code.

    Raises:
        JobError: no shard of the run is finished, a metric may not be loaded, or a link leads out of
            the folder.
    """
    check_contained(output)
    summary = summarise(output, allow_custom_code)
    csv, parquet = output / "summary.csv", output / "summary.parquet"
    pyarrow.csv.write_csv(summary, csv)
    pq.write_table(summary, parquet)
    plots = tuple(
        plot_frontier(summary, metric, output / f"frontier-{file_part(metric)}.png")
        for metric in metric_names(summary.schema)
    )
    return Report(summary, tally_of(output), csv, parquet, plots)
