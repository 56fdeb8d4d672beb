"""The report of a run: everything that is made from its row files alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from pipeline.report.plots import plot_frontier
from pipeline.report.summary import summarise
from pipeline.results.schema import metric_names


@dataclass(frozen=True)
class Report:
    """The summary and where it is written. `plots` has one picture a metric, in job order."""

    summary: pa.Table = field(repr=False)
    csv: Path
    parquet: Path
    plots: tuple[Path, ...]


def write_report(output: Path) -> Report:
    """Summarise a run and write `summary.csv`, `summary.parquet` and `frontier-METRIC.png` into it.

    Raises:
        JobError: no shard of the run is finished.
    """
    summary = summarise(output)
    csv, parquet = output / "summary.csv", output / "summary.parquet"
    pyarrow.csv.write_csv(summary, csv)
    pq.write_table(summary, parquet)
    plots = tuple(
        plot_frontier(summary, metric, output / f"frontier-{metric}.png")
        for metric in metric_names(summary.schema)
    )
    return Report(summary, csv, parquet, plots)
