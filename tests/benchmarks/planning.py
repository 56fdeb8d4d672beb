"""How well a plan foretells a run: the simulation, from mean busy seconds a round, against real time.

One drafter and one verifier on Ray. The run's own accounts say what a round takes, so what is held
against the clock is the simulation of the pipeline between the workers.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.config import load_job
from pipeline.planning.rounds import draft_length, earlier_run, predicted
from pipeline.planning.simulation import Pipeline, forecast
from pipeline.run import Prepared, fleet_plan, prepare, run
from tests.benchmarks.fleets import Unwatched
from tests.benchmarks.ratio import Ratio
from tests.planning.test_simulation import dealt

RUNS = 3
CASES = {
    "g2p pair": ("jobs/g2p.yaml", ["dataset.limit=400", "decoding.repeats=8"]),
    "demo pair": ("jobs/demo.yaml", ["dataset.limit=200"]),
}
SHORT = ("jobs/g2p.yaml", ["dataset.limit=400"])
"""Sixty rounds: the first draft, at which torch warms up and no verifier works, is a tenth of them."""


def measure() -> Iterator[Ratio]:
    """Foretold over real decoding time, and what a simulation of a thousand drafters takes."""
    for name, (path, overrides) in CASES.items():
        ratios = [foretold_over_real(path, overrides) for _ in range(RUNS)]
        yield Ratio(f"foretold / real seconds of decoding, 1:1, {name}", ratios, "0.85 to 1.15")
    ratios = [foretold_over_real(*SHORT) for _ in range(RUNS)]
    yield Ratio("the same, g2p pair, a run of two or three seconds", ratios, "report")
    seconds = [simulation_seconds() for _ in range(RUNS)]
    yield Ratio("seconds to simulate 1,000 drafters, 100 verifiers", seconds, "<= 10")


def foretold_over_real(path: str, overrides: list[str]) -> float:
    """Run a job on Ray, and foretell the same run from what its workers say of a round."""
    with tempfile.TemporaryDirectory() as folder:
        output = f"output={Path(folder) / 'run'}"
        prepared = prepare(load_job(path, [*overrides, "fleet=ray", "metrics=[]", output]))
        finished = run(prepared, Unwatched())
        return foretold(prepared) / finished.decoding_seconds


def foretold(prepared: Prepared) -> float:
    """Seconds of decoding that the accounts in a run's folder let expect."""
    rounds = earlier_run(prepared)
    assert rounds is not None
    calls = fleet_plan(prepared).all_verifiers()
    verifiers = prepared.cluster.verifier.count
    return predicted(rounds.steps, draft_length(prepared), calls, verifiers, rounds.count).seconds


def simulation_seconds() -> float:
    """CPU time of a simulation of many actors."""
    started = time.process_time()
    forecast(Pipeline(dealt(1000, 100, 3), 100, 0.01, 0.02, 0.002, spread=0.3), 10_000_000)
    return time.process_time() - started
