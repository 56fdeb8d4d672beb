"""Files: one schema in all of them, whole or not there, one table for every reader."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from pipeline.records import Shard
from pipeline.results import writer
from pipeline.results.schema import metric_names
from pipeline.results.writer import (
    count_rows,
    finished_shards,
    read_rows,
    rows_folder,
    shard_file,
    shard_files,
    write_shard,
)
from tests.results.runs import LAYOUT, FakeMetric, bad, good, shard_outcomes, table, write_run

SCORED = replace(LAYOUT, metrics=(FakeMetric("exact_match"),))


def rows_in(output: Path) -> set[int]:
    """How many rows each reader finds in the folder."""
    folder = rows_folder(output)
    return {
        pyarrow.dataset.dataset(folder).count_rows(),
        len(pd.read_parquet(folder)),
        duckdb.sql(f"select count(*) from '{folder}/*.parquet'").fetchall()[0][0],
    }


def test_column_types_do_not_drift_between_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All errors null; only errors; no rows; scores that look like whole numbers."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    shards = [(good("a"),), (bad("b"), bad("c")), (), (good("d"),)]
    for index, examples in enumerate(shards):
        shard = Shard(index, examples)
        scores = {"exact_match": [1] * len(shard_outcomes(shard))}
        write_shard(tmp_path, index, table(shard, layout=SCORED, scores=scores))
    for path in shard_files(tmp_path):
        found = pq.read_schema(path)
        assert found.equals(SCORED.schema)
        assert found.metadata == SCORED.schema.metadata
        assert [field.metadata for field in found] == [field.metadata for field in SCORED.schema]
    assert rows_in(tmp_path) == {16}
    files = [str(path) for path in shard_files(tmp_path)]
    loaded = datasets.load_dataset("parquet", data_files=files, split="train", streaming=False)
    assert loaded.num_rows == 16
    assert pd.read_parquet(rows_folder(tmp_path))["exact_match"].dtype == float


def test_schema_inference_would_drift() -> None:
    """The planted fault: without the explicit schema an all-null column has no type."""
    rows = table(Shard(0, (good("a"),))).to_pylist()
    assert pa.Table.from_pylist(rows).schema.field("error").type == pa.null()


def test_the_folder_of_rows_holds_only_rows(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    assert rows_in(tmp_path) == {24}
    assert count_rows(tmp_path) == 24
    assert sorted(path.name for path in rows_folder(tmp_path).iterdir()) == [
        f"shard-0000{index}.parquet" for index in range(3)
    ]


def test_a_retried_write_leaves_one_equal_copy(tmp_path: Path) -> None:
    write_run(tmp_path)
    before = shard_file(tmp_path, 1).read_bytes()
    write_run(tmp_path)
    assert rows_in(tmp_path) == {24}
    assert shard_file(tmp_path, 1).read_bytes() == before


@pytest.mark.parametrize("point", ["write", "sync", "rename"])
def test_a_writer_that_fails_at_any_point_leaves_no_broken_file(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, shards=1)

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    def fail_after_half(path: Path, *_: object, **__: object) -> None:
        path.write_bytes(b"PAR1 and then nothing")
        raise OSError("disk full")

    faults = {
        "write": (writer.pq, "ParquetWriter", fail_after_half),
        "sync": (writer, "_sync", fail),
        "rename": (Path, "replace", fail),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*faults[point])
        with pytest.raises(OSError, match="disk full"):
            write_shard(tmp_path, 1, table(Shard(1, (good("x"),))))
    assert finished_shards(tmp_path) == {0}
    assert rows_in(tmp_path) == {8}
    write_shard(tmp_path, 1, table(Shard(1, (good("x"),))))
    assert rows_in(tmp_path) == {12}
    assert len(list(rows_folder(tmp_path).iterdir())) == 2


KILLED = """
import os, pathlib, signal, sys
import pyarrow.parquet as pq
from pipeline.results import writer
from tests.results.runs import write_run
def half(path, *_, **__):
    path.write_bytes(b"PAR1 and then nothing")
    os.kill(os.getpid(), signal.SIGKILL)
writer.pq.ParquetWriter = half
write_run(pathlib.Path(sys.argv[1]), shards=1)
"""


def test_readers_skip_what_a_killed_writer_left(tmp_path: Path) -> None:
    write_run(tmp_path, shards=2)
    shard_file(tmp_path, 0).unlink()
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=120)
    assert run.returncode == -signal.SIGKILL
    left = [path.name for path in rows_folder(tmp_path).iterdir()]
    assert len(left) == 2
    assert finished_shards(tmp_path) == {1}
    assert rows_in(tmp_path) == {8}
    write_run(tmp_path, shards=2)
    assert rows_in(tmp_path) == {16}


def test_rows_are_read_in_shard_order_beyond_five_digits(tmp_path: Path) -> None:
    for index in (100000, 2, 99999):
        write_shard(tmp_path, index, table(Shard(index, (good("x"),))))
    assert [int(path.stem.split("-")[1]) for path in shard_files(tmp_path)] == [2, 99999, 100000]
    shards = read_rows(tmp_path, ["shard"]).column("shard").unique().to_pylist()
    assert shards == [2, 99999, 100000]


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    rows = table(Shard(0, (good("x"),)))
    metadata = {**rows.schema.metadata, b"schema_version": b"99"}
    write_shard(tmp_path, 0, rows.replace_schema_metadata(metadata))
    with pytest.raises(ValueError, match="schema version 99"):
        read_rows(tmp_path)


def test_metric_names_survive_the_file(tmp_path: Path) -> None:
    write_run(tmp_path, SCORED, shards=1)
    assert metric_names(pq.read_schema(shard_file(tmp_path, 0))) == ["exact_match"]
