"""How busy the busiest actor is while decoding, with one drafter and one verifier on Ray."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.config import load_job
from pipeline.records import WorkerStats
from pipeline.run import prepare, run
from tests.benchmarks.ratio import Ratio

RUNS = 3
EXAMPLES = 200


class Clock:
    """A watcher that remembers the busy seconds of each worker at two moments of steady work."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, list[float]]] = []

    def started(self, rows_done: int, rows_total: int | None) -> None:
        """Nothing to note."""

    def ready(self) -> None:
        """Nothing to note."""

    def progressed(self, rows_done: int, workers: Sequence[WorkerStats]) -> None:
        """Note the time and the busy seconds."""
        self.seen.append((time.perf_counter(), [worker.busy_seconds for worker in workers]))

    def efficiency(self) -> float:
        """Busy share of the busiest worker between the first and the last tenth of the run."""
        cut = max(1, len(self.seen) // 10)
        (start, before), (end, after) = self.seen[cut], self.seen[-1 - cut]
        return max(b - a for a, b in zip(before, after, strict=True)) / (end - start)


def measure() -> Iterator[Ratio]:
    """Busy seconds over wall seconds."""
    values = []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            job = load_job(
                "jobs/demo.yaml",
                [
                    f"dataset.limit={EXAMPLES}",
                    "metrics=[]",
                    f"output={Path(folder) / 'run'}",
                ],
            )
            clock = Clock()
            run(prepare(job), clock)
            values.append(clock.efficiency())
    yield Ratio("busiest actor's busy seconds / wall, demo pair on Ray", values, ">= 0.9")
