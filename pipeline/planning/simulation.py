"""How long a fleet takes, by a simulation of discrete events: banks that go around between workers.

A bank queues for its drafter, is drafted, travels, queues for its verifier, is verified, and travels
back. A worker does one thing at a time, first come, first served, as `DrafterEngine` and
`VerifierEngine` do. Whoever comes to such a worker knows at once when it will leave, so each arrival is
one event and a round costs two: a heap takes millions, where a process a bank would take thousands.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 60
"""Rounds of each bank that are simulated; a longer run goes on at the rate of the window's middle."""


@dataclass(frozen=True)
class Pipeline:
    """A fleet and what a round of a bank takes in it.

    `spread` is the standard deviation of a piece of work over its mean; work is then gamma distributed.
    """

    calls: Sequence[Sequence[int]]
    """For each drafter the verifier, by index, of each of its banks."""
    verifiers: int
    drafter_seconds: float
    """Of a drafter's work on a round: verdicts applied, a block drafted."""
    verifier_seconds: float
    transfer_seconds: float = 0.0
    """Of both ways together."""
    spread: float = 0.0
    seed: int = 0

    @property
    def banks(self) -> int:
        """All banks of the fleet."""
        return sum(map(len, self.calls))


@dataclass(frozen=True)
class Forecast:
    """What a simulation says. Shares are busy seconds over all seconds, in the mean of a role."""

    rounds: int
    seconds: float
    drafter_share: float
    verifier_share: float

    @property
    def rounds_per_second(self) -> float:
        """Of all banks together."""
        return self.rounds / self.seconds if self.seconds else 0.0


def forecast(pipeline: Pipeline, rounds: int) -> Forecast:
    """Simulate so many rounds of banks; all are there at the start, and any drafter may do them."""
    window = min(rounds, WINDOW * pipeline.banks)
    ends = sorted(_ends(pipeline, window))
    seconds = ends[-1] + pipeline.transfer_seconds / 2 if ends else 0.0
    if rounds > window:
        first, last = window // 4, 3 * window // 4
        seconds += (rounds - window) * (ends[last] - ends[first]) / (last - first)
    return Forecast(
        rounds,
        seconds,
        _share(rounds * pipeline.drafter_seconds, seconds, len(pipeline.calls)),
        _share(rounds * pipeline.verifier_seconds, seconds, pipeline.verifiers),
    )


def _share(busy: float, seconds: float, workers: int) -> float:
    # Drawn work may have summed to less than its mean.
    return min(1.0, busy / (seconds * workers)) if seconds else 0.0


def _ends(pipeline: Pipeline, rounds: int) -> list[float]:
    """When the verification of each round ends."""
    drafter_of = [drafter for drafter, calls in enumerate(pipeline.calls) for _ in calls]
    verifier_of = [verifier for calls in pipeline.calls for verifier in calls]
    free = {False: [0.0] * len(pipeline.calls), True: [0.0] * pipeline.verifiers}
    work = (_work(pipeline, rounds, 0), _work(pipeline, rounds, 1))
    way = pipeline.transfer_seconds / 2
    # An event is a bank that comes to its drafter or, where the flag is set, to its verifier. The
    # counter lets events of one time take their turns.
    events = [(0.0, bank, bank, False) for bank in range(pipeline.banks)]
    counter, begun = pipeline.banks, 0
    ends: list[float] = []
    while events:
        time, _, bank, verifying = heapq.heappop(events)
        if not verifying and begun == rounds:
            continue
        worker = verifier_of[bank] if verifying else drafter_of[bank]
        number = len(ends) if verifying else begun
        end = max(time, free[verifying][worker]) + work[verifying][number]
        free[verifying][worker] = end
        if verifying:
            ends.append(end)
        else:
            begun += 1
        counter += 1
        heapq.heappush(events, (end + way, counter, bank, not verifying))
    return ends


def _work(pipeline: Pipeline, rounds: int, role: int) -> list[float]:
    """Seconds of each piece of work of the drafters (role 0) or of the verifiers (role 1)."""
    mean = (pipeline.drafter_seconds, pipeline.verifier_seconds)[role]
    if not pipeline.spread or not mean:
        return [mean] * rounds
    shape = pipeline.spread**-2
    chance = np.random.default_rng((pipeline.seed, role))
    drawn: list[float] = chance.gamma(shape, mean / shape, rounds).tolist()
    return drawn
