"""A run that was ended at any point is finished by the same command, with the rows of an undisturbed one.

Planted faults these tests catch: a file that is visible before it is whole; a shard that is written
again, or never; leftovers that pile up; rows that depend on how many workers wrote them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.config import JobError
from pipeline.results.lock import locked
from pipeline.results.output import OutputError
from pipeline.results.writer import finished_shards, rows_folder, shard_files
from pipeline.run import prepare, run
from tests.fleet.conftest import REPOSITORY
from tests.fleet.test_same_rows import ALL_STRATEGIES, Silent, rows_of

SHARD = ["dataset.shard_size=4", ALL_STRATEGIES]

# Arguments: where to end, at which shard that this process writes, and the overrides of the job.
ENDED = """
import os, pathlib, sys
from pipeline.config import load_job
from pipeline.results import writer
from pipeline.run import prepare, run
from tests.fleet.test_same_rows import Silent

point, shard, *overrides = sys.argv[1:]
published = 0
publish, replace = writer.publish, pathlib.Path.replace

def end_before_data(path, *_, **__):
    path.write_bytes(b"PAR1 and then nothing")
    os._exit(7)

def end_before_name(*_):
    os._exit(7)

def ending(draft, path):
    global published
    published += 1
    if published == int(shard):
        if point == "before the name":
            pathlib.Path.replace = end_before_name
        publish(draft, path)
        os._exit(7)
    publish(draft, path)
    if published == int(shard) - 1 and point == "before the data":
        writer.pq.ParquetWriter = end_before_data

writer.publish = ending
run(prepare(load_job("jobs/g2p.yaml", overrides)), Silent())
"""


def ended(point: str, shard: int, overrides: Sequence[str]) -> int:
    """Run a job in a process that ends itself; its exit status."""
    return subprocess.run(
        [sys.executable, "-c", ENDED, point, str(shard), *overrides],
        cwd=REPOSITORY,
        timeout=300,
        check=False,
    ).returncode


def test_what_was_ended_anywhere_is_finished_with_the_same_rows(
    g2p_job: Any, cluster_file: Any, tmp_path: Path
) -> None:
    calm = rows_of(g2p_job(*SHARD, f"output={tmp_path / 'calm'}"))
    output = tmp_path / "run"
    fleets = ["{banks: 1, slots: 3}", "{replicas: 2, slots: 5}", "{banks: 4, slots: 2}"]
    # Point, which of the shards that are left, and how many are finished then.
    ends = [
        ("before the data", 2, 1),
        ("before the name", 1, 1),
        ("before the name", 1, 1),
        ("after the name", 2, 3),
    ]
    for number, (point, shard, finished) in enumerate(ends):
        cluster = cluster_file(fleets[number % 3], f"{{replicas: {1 + number % 2}}}")
        overrides = [*SHARD, "fleet=local", "dataset.limit=24", f"cluster={cluster}"]
        assert ended(point, shard, [*overrides, f"output={output}"]) == 7
        assert len(finished_shards(output)) == finished, point
        for path in shard_files(output):
            assert pq.read_metadata(path).num_rows == 4 * 13
        drafts = [path for path in rows_folder(output).iterdir() if path.name.endswith(".tmp")]
        assert len(drafts) == (not point.startswith("after")), "that of this run alone"
    resumed = rows_of(g2p_job(*SHARD))
    assert resumed.equals(calm)
    assert all(path.suffix == ".parquet" for path in rows_folder(output).iterdir())


def test_drafts_are_removed_by_who_holds_the_folder_and_nothing_else_is(g2p_job: Any) -> None:
    job = g2p_job("dataset.limit=2", "strategies=[drafter]")
    output = Path(job.output)
    rows_folder(output).mkdir(parents=True)
    drafts = [output / ".manifest.json.77.tmp", rows_folder(output) / ".shard-00000.parquet.77.tmp"]
    others = [output / "notes.tmp", output / ".mine.tmp"]
    for path in (*drafts, *others):
        path.write_text("")
    run(prepare(job), Silent())
    assert not any(path.exists() for path in drafts)
    assert all(path.exists() for path in others)


def test_a_finished_run_loads_no_model_whatever_workers_it_is_given(
    g2p_job: Any, cluster_file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(prepare(g2p_job("dataset.limit=4", *SHARD)), Silent())

    def refuse(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("pipeline.fleet.interface.load_model", refuse)
    cluster = cluster_file("{replicas: 3, banks: 2, slots: 7}")
    again = g2p_job("dataset.limit=4", *SHARD, f"cluster={cluster}", "fleet=ray")
    finished = run(prepare(again), Silent())
    assert (finished.shards_found, finished.shards_written) == (1, 0)


def test_an_empty_dataset_is_refused(g2p_job: Any, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(JobError, match="has no rows"):
        prepare(g2p_job(f"dataset.data_files={empty}"))


def test_more_drafters_than_shards(g2p_job: Any, cluster_file: Any, tmp_path: Path) -> None:
    few = rows_of(g2p_job("dataset.limit=5", *SHARD, f"output={tmp_path / 'few'}"))
    cluster = cluster_file("{replicas: 5, slots: 2}", "{replicas: 3}")
    assert rows_of(g2p_job("dataset.limit=5", *SHARD, f"cluster={cluster}")).equals(few)


# A limit on the size of files is a full disk that needs no disk: the write fails halfway.
SMALL_DISK = """
import resource, sys
from jobs.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
main()
"""


def command(output: Path, *given: str, limit: int) -> subprocess.CompletedProcess[str]:
    """`speccascade run` on a disk that takes no file larger than the limit."""
    sets = ["fleet=local", "dataset.limit=24", *SHARD, f"output={output}", *given]
    arguments = [argument for one in sets for argument in ("--set", one)]
    return subprocess.run(
        [sys.executable, "-c", SMALL_DISK, str(limit), "run", "jobs/g2p.yaml", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "MPLCONFIGDIR": str(output.parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_full_disk_ends_the_run_in_a_sentence_and_is_resumed(
    g2p_job: Any, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    full = command(output, limit=12_000)
    assert full.returncode == 1, full.stdout + full.stderr
    said = " ".join(full.stderr.split())
    assert f"output: {output} cannot be written: " in said
    assert "run the same command again to resume" in said
    assert "Traceback" not in said
    assert [path.name for path in rows_folder(output).iterdir()] == []
    again = command(output, limit=10**9)
    assert again.returncode == 0, again.stdout + again.stderr
    rows = rows_of(g2p_job(*SHARD))
    assert rows.equals(rows_of(g2p_job(*SHARD, f"output={tmp_path / 'calm'}")))


def test_a_folder_that_cannot_be_held_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = r"output: .*file/run cannot be written: Not a directory\. .* to resume"
    with pytest.raises(OutputError, match=said), locked(tmp_path / "file" / "run"):
        raise AssertionError("it was held")
