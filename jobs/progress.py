"""How a run is shown: a progress bar in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from pipeline.records import WorkerStats
from pipeline.run import Finished

_LINE_SECONDS = 10.0


class RunProgress:
    """Shows a run's rows, its rate and how busy the workers are. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rows"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[busy]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting workers", total=None, busy="")
        self._total: int | None = None
        self._ready_at = self._last_line = time.monotonic()

    def __enter__(self) -> RunProgress:
        """Start drawing."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing."""
        self._bar.stop()

    def started(self, rows_done: int, rows_total: int | None) -> None:
        """The workers are about to be started."""
        self._total = rows_total
        self._bar.update(self._task, completed=rows_done, total=rows_total)
        self._line("starting the workers")

    def ready(self) -> None:
        """All models are loaded."""
        self._ready_at = time.monotonic()
        self._bar.update(self._task, description="decoding")
        self._line("all models are loaded; decoding")

    def progressed(self, rows_done: int, workers: Sequence[WorkerStats]) -> None:
        """Show rows and busy shares."""
        elapsed = max(time.monotonic() - self._ready_at, 1e-6)
        shares = [f"{worker.name} {worker.busy_seconds / elapsed:.0%}" for worker in workers]
        busy = "busy: " + ", ".join(shares[:4])
        self._bar.update(self._task, completed=rows_done, busy=busy)
        if time.monotonic() - self._last_line > _LINE_SECONDS:
            of_total = f" of {self._total}" if self._total is not None else ""
            self._line(f"{rows_done}{of_total} rows, {elapsed:.0f} s, {busy}")

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        if not self._console.is_terminal:
            self._console.print(text)


def print_workers(console: Console, finished: Finished) -> None:
    """What each worker did, and how well the two models kept each other busy."""
    table = Table(
        "worker", "rounds", "lanes", "texts", "busy", "waited", "blocks queued", "transfer", "sent"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for worker in finished.workers:
        rounds = max(worker.rounds, 1)
        table.add_row(
            worker.name,
            f"{worker.rounds}",
            f"{worker.lane_rounds / rounds:.1f}",
            f"{worker.pair_rounds / rounds:.1f}",
            f"{worker.busy_seconds:.1f} s",
            f"{worker.wait_seconds:.1f} s",
            f"{worker.queue_seconds:.1f} s",
            f"{worker.transfer_seconds:.1f} s",
            f"{worker.bytes_sent / rounds / 1000:.0f} KB",
        )
    console.print(table)
    console.print(
        "Lanes, texts and what was sent are means of a round: a lane is computed once for all texts "
        "that so far agree."
    )
    console.print(
        f"Efficiency: the busiest worker was busy {finished.efficiency:.0%} of the "
        f"{finished.decoding_seconds:.1f} s of decoding"
    )
