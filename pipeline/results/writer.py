"""The files of a run: one Parquet file for each finished shard, whole or not there at all.

    OUTPUT/rows/shard-00000.parquet    nothing but row files: the folder reads as one table
    OUTPUT/manifest.json               written before the first row
    OUTPUT/summary.csv, *.png          what the report makes of the rows

A file is written under a name that begins with a dot, which readers of the folder skip, and
renamed when it is safe on disk. So a file that exists is a shard that is done. What a writer that was
killed left under such a name is removed by the next run.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.results.output import writing
from pipeline.results.schema import PROJECT, SCHEMA_VERSION


def rows_folder(output: Path) -> Path:
    """The folder that holds the row files and nothing else."""
    return output / "rows"


def shard_file(output: Path, shard: int) -> Path:
    """Where the rows of a shard are, once it is finished."""
    return rows_folder(output) / f"shard-{shard:05d}.parquet"


def write_shard(output: Path, shard: int, table: pa.Table) -> Path:
    """Write a finished shard at once; a retry replaces the file. Returns its path.

    Raises:
        OutputError: it cannot be written; there is then nothing of it.
    """
    path = shard_file(output, shard)
    draft = draft_path(path)
    with writing(output):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with pq.ParquetWriter(draft, table.schema, compression="zstd") as writer:
                # `datasets` cannot read a row group of no rows.
                if table.num_rows:
                    writer.write_table(table)
            publish(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    return path


def finished_shards(output: Path) -> frozenset[int]:
    """The shards whose rows are written."""
    return frozenset(_numbered_files(output))


def shard_files(output: Path) -> list[Path]:
    """The row files in shard order."""
    return [path for _, path in sorted(_numbered_files(output).items())]


def read_rows(output: Path, columns: list[str] | None = None) -> pa.Table:
    """The rows of a run in shard order. Raises `ValueError` for files of another schema version."""
    schema = rows_schema(output)
    wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    tables = [pq.ParquetFile(path).read(columns=columns) for path in shard_files(output)]
    return pa.concat_tables([wanted.empty_table(), *tables], promote_options="none")


def count_rows(output: Path) -> int:
    """How many rows are written, from the files' footers."""
    return sum(int(pq.read_metadata(path).num_rows) for path in shard_files(output))


def rows_schema(output: Path) -> pa.Schema:
    """The schema of a run's row files.

    Raises:
        FileNotFoundError: no shard is finished.
        ValueError: the files are not this project's, or of another schema version.
    """
    files = shard_files(output)
    if not files:
        raise FileNotFoundError(f"{rows_folder(output)} holds no finished shard")
    schema = pq.read_schema(files[0])
    version = (schema.metadata or {}).get(b"schema_version", b"none").decode()
    if version != str(SCHEMA_VERSION):
        raise ValueError(
            f"{files[0]} has schema version {version}; this {PROJECT} reads {SCHEMA_VERSION}"
        )
    return schema


def draft_path(path: Path) -> Path:
    """A name beside `path` that readers skip, and that no other process uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def remove_drafts(output: Path) -> None:
    """Remove what writers that were killed left. Only who holds the run's folder may."""
    for folder in (output, rows_folder(output)):
        for path in folder.glob(".*.tmp"):
            if re.fullmatch(r"\..+\.\d+\.tmp", path.name):
                path.unlink(missing_ok=True)


def publish(draft: Path, path: Path) -> None:
    """Give a file its final name once its bytes are on disk."""
    _sync(draft)
    draft.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _numbered_files(output: Path) -> dict[int, Path]:
    found = {}
    for path in rows_folder(output).glob("shard-*.parquet"):
        match = re.fullmatch(r"shard-(\d+)\.parquet", path.name)
        if match:
            found[int(match[1])] = path
    return found
