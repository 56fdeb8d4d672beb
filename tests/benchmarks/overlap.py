"""What the pipeline between the models costs: how busy it keeps them, and against the bare workers.

One drafter and one verifier on Ray, each pinned to a core of its own.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from pipeline.config import Job, load_job
from pipeline.data.shards import iter_shards
from pipeline.fleet.interface import FleetPlan
from pipeline.protocol.sequence import decoded
from pipeline.records import WorkerStats
from pipeline.run import Prepared, prepare, run
from tests.benchmarks.ratio import Ratio
from tests.loop import drive

RUNS = 3
SHORT_WORK = ["dataset.limit=400", "decoding.repeats=10"]
ACTORS = ("ray::.*DrafterActor", "ray::.*VerifierActor")


class Clock:
    """A watcher that pins the actors and remembers their busy seconds while work is steady."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, list[float]]] = []

    def started(self, rows_done: int, rows_total: int | None) -> None:
        """Nothing to note."""

    def ready(self) -> None:
        """The actors are there: one core each, as far as there are cores."""
        for core, actor in enumerate(ACTORS):
            found = subprocess.run(
                ["pgrep", "-f", actor], capture_output=True, text=True, check=True
            )
            for pid in found.stdout.split():
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), {core % (os.cpu_count() or 1)})

    def progressed(self, rows_done: int, workers: Sequence[WorkerStats]) -> None:
        """Note the time and the busy seconds."""
        self.seen.append((time.perf_counter(), [worker.busy_seconds for worker in workers]))

    def efficiency(self) -> float:
        """Busy share of the busiest worker between the first and the last tenth of the run."""
        cut = max(1, len(self.seen) // 10)
        (start, before), (end, after) = self.seen[cut], self.seen[-1 - cut]
        return max(b - a for a, b in zip(before, after, strict=True)) / (end - start)


def pipelined(prepared: Prepared) -> tuple[float, float]:
    """Run on Ray. Efficiency while work was steady, and all seconds of decoding."""
    clock = Clock()
    finished = run(prepared, clock)
    return clock.efficiency(), finished.decoding_seconds


def bare_seconds(prepared: Prepared) -> float:
    """The same workers called in turn in this process, on one core, all examples as one shard."""
    plan = FleetPlan(
        prepared.job.models,
        prepared.pairing.vocabulary,
        decoded(prepared.strategies),
        prepared.settings,
        prepared.cluster,
        transport=prepared.transport,
    )
    drafter, verifier = plan.load_drafter("drafter-0"), plan.load_verifier()
    for shard in iter_shards(prepared.job.dataset, prepared.reader):
        drafter.add(shard)
    started = time.perf_counter()
    drive(drafter, verifier.verify)
    return time.perf_counter() - started


def job(path: str, folder: str, *overrides: str) -> Job:
    """A job without metrics whose rows go to a folder that is thrown away."""
    output = Path(folder) / "run"
    return load_job(path, [*overrides, "metrics=[]", "fleet=ray", f"output={output}"])


def measure() -> Iterator[Ratio]:
    """Busy seconds over wall seconds, and the pipeline's rate over that of the bare workers."""
    torch.set_num_threads(1)
    cases = (
        ("demo pair", "jobs/demo.yaml", ["dataset.limit=200"], 3, ">= 0.9"),
        # Pieces of work this short vary as much as they take; a fourth bank bridges that.
        ("g2p pair, a few ms of work", "jobs/g2p.yaml", SHORT_WORK, 4, ">= 0.95"),
    )
    for name, path, overrides, banks, target in cases:
        busy, rates = [], []
        for _ in range(RUNS):
            with tempfile.TemporaryDirectory() as folder:
                cluster = Path(folder) / "cluster.yaml"
                cluster.write_text(f"drafter: {{banks: {banks}}}", encoding="utf-8")
                prepared = prepare(job(path, folder, f"cluster={cluster}", *overrides))
                efficiency, seconds = pipelined(prepared)
                busy.append(efficiency)
                rates.append(bare_seconds(prepared) / seconds)
        yield Ratio(f"busiest actor's busy seconds / wall, {name}", busy, target)
        yield Ratio(f"tokens a second, pipeline / bare workers in turn, {name}", rates, ">= 0.9")
