"""Reading a run's rows for people: what a folder lacks is said in a sentence."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config import JobError
from pipeline.results.writer import finished_shards, rows_schema, shard_files


def read_schema(output: Path) -> pa.Schema:
    """The schema of a run's rows. Raises `JobError` if no shard is finished yet."""
    if not finished_shards(output):
        raise JobError(f"{output} holds no finished shard; run the job first")
    return rows_schema(output)


def read_example(output: Path, example_id: str, columns: list[str]) -> pa.Table:
    """The rows of one example, in job order; none if no finished shard has it."""
    wanted = pc.field("example_id") == example_id
    tables = [pq.read_table(path, columns=columns, filters=wanted) for path in shard_files(output)]
    return pa.concat_tables(tables)
