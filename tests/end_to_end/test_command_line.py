"""The program as a user meets it: a process, its output and its exit status."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow.dataset as ds
import pytest

REPOSITORY = Path(__file__).parents[2]
SPECCASCADE = Path(sys.executable).with_name("speccascade")


def speccascade(*arguments: str, status: int = 0) -> str:
    done = subprocess.run(
        [str(SPECCASCADE), *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.ray
def test_a_job_runs_on_ray_and_is_resumed_and_reported(tmp_path: Path) -> None:
    output = tmp_path / "run"
    job = [
        "run",
        "jobs/g2p.yaml",
        "--set",
        f"output={output}",
        "--set",
        "dataset.limit=30",
        "--set",
        "dataset.shard_size=8",
    ]
    said = speccascade(*job)
    assert "4 shards written" in said
    for strategy in ("drafter", "verifier", "spec_decode", "spec_cascade.opt(alpha=0.1)"):
        assert strategy in said
    assert str(output / "frontier-exact_match.png") in said
    assert (output / "frontier-exact_match.png").stat().st_size > 10_000

    rows = output / "rows"
    read_by = (
        ds.dataset(rows).to_table().num_rows,
        len(pd.read_parquet(rows)),
        duckdb.sql(f"SELECT count(*) FROM '{rows}/*.parquet'").fetchall()[0][0],
    )
    assert read_by == (300, 300, 300)
    manifest = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["job"]["dataset"]["limit"] == 30

    (rows / "shard-00002.parquet").unlink()
    assert "1 shards written" in speccascade(*job)
    assert "0 shards written" in speccascade(*job)
    assert "spec_decode" in speccascade("report", str(output))

    changed = speccascade(*job, "--set", "decoding.seed=1", status=2)
    assert "decoding.seed" in changed


def test_help_teaches() -> None:
    assert "run" in speccascade("--help")
    said = speccascade("run", "--help")
    for words in ("JOB.yaml", "--set", "Example", "resume" if "resume" in said else "carry on"):
        assert words in said


def test_a_mistake_ends_in_one_sentence_and_status_two() -> None:
    said = speccascade("run", "jobs/g2p.yaml", "--set", "dataset.limt=3", status=2)
    assert "dataset.limt is not a key; did you mean 'limit'?" in said
    assert "Traceback" not in said


@pytest.mark.ray
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_keeps_its_shards_and_says_how_to_resume(
    tmp_path: Path, sent: signal.Signals
) -> None:
    output = tmp_path / "run"
    job = [
        "run",
        "jobs/g2p.yaml",
        "--set",
        f"output={output}",
        "--set",
        "dataset.limit=1500",
        "--set",
        "dataset.shard_size=20",
    ]
    running = subprocess.Popen(
        [str(SPECCASCADE), *job],
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 120
    while not list(output.glob("rows/shard-*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.2)
    running.send_signal(sent)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "run the same command again to resume" in said
    assert "Traceback" not in said
    finished = sorted(output.glob("rows/*"))
    assert finished
    for path in finished:
        assert ds.dataset(path).count_rows() == 200
