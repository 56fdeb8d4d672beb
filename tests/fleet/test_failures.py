"""Workers that die or hang cost time, not rows: the table is that of an undisturbed run.

Planted faults these tests catch: a verifier's death that ends the run; blocks judged by caches of
another life; a drafter's shards that are lost or written twice; a hang that nobody notices.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import JobError
from pipeline.records import WorkerStats
from pipeline.results.lock import locked
from pipeline.results.schema import determined_columns
from pipeline.results.writer import read_rows
from pipeline.run import Finished, prepare, run
from tests.fleet.test_same_rows import ALL_STRATEGIES, Silent, rows_of

Act = tuple[int, str, signal.Signals]
"""After so many reports, what is done to whom."""


class Chaos(Silent):
    """A watcher that sends signals to workers."""

    def __init__(self, *acts: Act) -> None:
        self.acts = list(acts)
        self.reports = 0

    def progressed(self, rows_done: int, workers: Sequence[WorkerStats]) -> None:
        """Act on whoever is there, when it has begun to work."""
        self.reports += bool(rows_done)
        for worker in workers:
            if self.acts and self.acts[0][0] <= self.reports and worker.name == self.acts[0][1]:
                os.kill(worker.pid, self.acts.pop(0)[2])
                return


@pytest.fixture
def long_job(g2p_job: Any, cluster_file: Any) -> Callable[..., Any]:
    """Makes a job of some seconds: few slots, small shards."""

    def make(*overrides: str, replicas: int = 1) -> Any:
        role = f"{{replicas: {replicas}, slots: 4}}"
        cluster = cluster_file(role, f"{{replicas: {replicas}}}\nfailure: {{silence_seconds: 4}}")
        fixed = [ALL_STRATEGIES, "dataset.limit=120", "dataset.shard_size=10"]
        return g2p_job(*fixed, f"cluster={cluster}", *overrides)

    return make


def disturbed(job: Any, *acts: Act) -> tuple[Any, Finished]:
    """The determined columns of a run in which things happen, in dataset order."""
    chaos = Chaos(*acts)
    finished = run(prepare(job), chaos)
    assert not chaos.acts, "the run was over before all was done to it"
    table = read_rows(Path(job.output))
    columns = [name for name in determined_columns(table.schema) if name not in {"shard", "job"}]
    return table.select(columns), finished


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    "acts",
    [
        [(1, "verifier-0", signal.SIGKILL)],
        [(1, "drafter-0", signal.SIGKILL)],
        [(1, "verifier-0", signal.SIGSTOP)],
        [(1, "drafter-0", signal.SIGSTOP)],
        [(1, "verifier-1", signal.SIGKILL), (2, "drafter-1", signal.SIGKILL)],
    ],
    ids=["verifier-killed", "drafter-killed", "verifier-hangs", "drafter-hangs", "one-of-two-each"],
)
def test_rows_are_those_of_an_undisturbed_run(
    long_job: Any, ray_cluster: None, tmp_path: Path, acts: list[Act]
) -> None:
    expected = rows_of(long_job(f"output={tmp_path / 'calm'}"))
    replicas = 2 if any(name.endswith("1") for _, name, _ in acts) else 1
    table, finished = disturbed(long_job("fleet=ray", replicas=replicas), *acts)
    assert table.equals(expected)
    retried = finished.retries + sum(worker.retries for worker in finished.workers)
    assert retried > 0


def test_a_finished_run_loads_no_model(g2p_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = g2p_job()
    run(prepare(job), Silent())

    def refuse(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("pipeline.fleet.interface.load_model", refuse)
    finished = run(prepare(job), Silent())
    assert finished.shards_written == 0
    assert finished.shards_found == 1


def test_a_folder_in_use_is_refused_and_names_the_holder(g2p_job: Any) -> None:
    job = g2p_job()
    with locked(Path(job.output)), pytest.raises(JobError, match=f"process {os.getpid()} on "):
        run(prepare(job), Silent())
    run(prepare(job), Silent())
