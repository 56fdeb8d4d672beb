"""What a worker did: counts and times for the run's summary and, if asked for, a timeline."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.models.interface import Effort
from pipeline.records import Span, WorkerStats


class Ledger:
    """The accounts of one worker.

    Busy time is that of the model thread, which does one thing at a time. Between the first piece of
    work and the last, a worker that is not busy waits: a drafter for verdicts or shards, a verifier
    for blocks.

    Args:
        effort: what the worker's model computes is read from here.
        keep_spans: whether to remember each piece of work; memory then grows with the run.
    """

    def __init__(self, name: str, node: str, effort: Effort, keep_spans: bool = False) -> None:
        self.name = name
        self.spans: list[Span] = []
        self._node = node
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._effort = effort
        self._keep_spans = keep_spans
        self._began: float | None = None
        # Spans of several hosts stand on one axis: wall-clock time at one moment, then a steady clock.
        self._wall_clock = time.time() - time.perf_counter()

    @contextmanager
    def busy(self, act: str, bank: str, lanes: int = 0) -> Iterator[None]:
        """Time a piece of work of the model thread."""
        started = time.perf_counter()
        self._began = self._began or started
        yield
        ended = time.perf_counter()
        self._sums["busy_seconds"] += ended - started
        wait = ended - self._began - self._sums["busy_seconds"]
        self._sums["wait_seconds"] = max(0.0, wait)
        self.span(act, bank, started, ended)

    def span(self, act: str, bank: str, started: float, ended: float) -> None:
        """Remember something that took time, by `time.perf_counter`."""
        if self._keep_spans:
            start = self._wall_clock + started
            self.spans.append(Span(self.name, act, bank, start, ended - started))

    def count(self, **more: float) -> None:
        """Add to counts and times of `WorkerStats` by name."""
        for name, value in more.items():
            self._sums[name] += value

    @property
    def stats(self) -> WorkerStats:
        """All accounts as they stand."""
        sums: dict[str, Any] = {
            name: value if name.endswith("_seconds") else int(value)
            for name, value in self._sums.items()
        }
        return WorkerStats(
            self.name,
            self._node,
            os.getpid(),
            positions_stepped=self._effort.stepped,
            positions_prefilled=self._effort.prefilled,
            positions_reused=self._effort.reused,
            **sums,
        )
