"""Fleets of other shapes than one to one on real Ray actors: all rows are there, all workers at work.

Two cores cannot run five actors side by side, so time says nothing here: how evenly rounds are spread
does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.config import load_job
from pipeline.records import WorkerStats
from pipeline.results.writer import count_rows
from pipeline.run import prepare, run
from tests.benchmarks.ratio import Ratio

RUNS = 3
EXAMPLES = 100
FLEETS = {
    "4:1": """
        drafter:  {replicas: 4, num_cpus: 0.4, banks: 3, slots: 8}
        verifier: {replicas: 1, num_cpus: 0.4}
    """,
    "1:2": """
        drafter:  {replicas: 1, num_cpus: 0.5, banks: 4, slots: 16}
        verifier: {replicas: 2, num_cpus: 0.5}
    """,
}


class Unwatched:
    """A watcher that looks away."""

    def started(self, rows_done: int, rows_total: int | None) -> None:
        """Nothing to note."""

    def ready(self) -> None:
        """Nothing to note."""

    def progressed(self, rows_done: int, workers: Sequence[WorkerStats]) -> None:
        """Nothing to note."""


def measure() -> Iterator[Ratio]:
    """Rows over those asked for, and rounds of the least busy worker of a role over the most busy."""
    for name, cluster in FLEETS.items():
        runs = [decode(cluster) for _ in range(RUNS)]
        yield Ratio(f"{name} on Ray: rows / rows asked for", [rows for rows, _ in runs], "1")
        for role in ("drafter", "verifier"):
            values = [balance(role, workers) for _, workers in runs]
            yield Ratio(f"{name} on Ray: least / most rounds of a {role}", values, ">= 0.8")


def decode(cluster: str) -> tuple[float, Sequence[WorkerStats]]:
    """Run the demo job on a fleet: the share of its rows that were written, and the workers' stats."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "cluster.yaml"
        config.write_text(cluster, encoding="utf-8")
        overrides = [
            f"dataset.limit={EXAMPLES}",
            "dataset.shard_size=5",
            "metrics=[]",
            f"cluster={config}",
            f"output={Path(folder) / 'run'}",
        ]
        prepared = prepare(load_job("jobs/demo.yaml", overrides))
        finished = run(prepared, Unwatched())
        rows = count_rows(prepared.output)
    return rows / (EXAMPLES * prepared.rows_per_example), finished.workers


def balance(role: str, workers: Sequence[WorkerStats]) -> float:
    """Rounds of the worker of a role that did fewest over those of the one that did most."""
    rounds = [worker.rounds for worker in workers if worker.name.startswith(role)]
    return min(rounds) / max(rounds)
