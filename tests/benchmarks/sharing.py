"""What lanes that carry many strategies save: a 40-strategy sweep against 40 single runs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import load_job
from pipeline.run import prepare, run
from tests.benchmarks.ratio import Ratio
from tests.fleet.test_same_rows import Silent

EXAMPLES = 32
ALPHAS = {
    "lossy_spec_decode": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7],
    "spec_cascade.chow": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7],
    "spec_cascade.diff": [-0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4],
    "spec_cascade.opt": [0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8],
    "spec_cascade.token_v3": [0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98],
}
LINES = [
    "drafter",
    "verifier",
    "spec_decode",
    *(f"{{use: {use}, alpha: {alpha}}}" for use, alphas in ALPHAS.items() for alpha in alphas),
    *(f"{{use: token_cascade.chow, alpha: {alpha}}}" for alpha in (0.3, 0.5)),
]


@dataclass(frozen=True)
class Cost:
    """What a run took: lane rounds of the models, and wall seconds of decoding."""

    lane_rounds: int
    seconds: float


def cost(lines: list[str], temperature: float) -> Cost:
    """Run the demo pair with some strategies."""
    with tempfile.TemporaryDirectory() as folder:
        job = load_job(
            "jobs/demo.yaml",
            [
                f"strategies=[{', '.join(lines)}]",
                f"decoding.temperature={temperature}",
                f"dataset.limit={EXAMPLES}",
                "metrics=[]",
                "fleet=local",
                f"output={Path(folder) / 'run'}",
                "step_seconds={drafter: 1, verifier: 1}",
            ],
        )
        prepared = prepare(job)
        started = time.perf_counter()
        finished = run(prepared, Silent())
        seconds = time.perf_counter() - started
    verifier = next(worker for worker in finished.workers if worker.name == "verifier-0")
    return Cost(verifier.lane_rounds, seconds)


def measure() -> Iterator[Ratio]:
    """Model work and wall time of the sweep over those of the single runs, at two temperatures."""
    for temperature, target in ((1.0, "<= 0.30"), (0.0, "<= 0.18")):
        together = cost(LINES, temperature)
        alone = [cost([line], temperature) for line in LINES]
        rounds = together.lane_rounds / sum(one.lane_rounds for one in alone)
        seconds = together.seconds / sum(one.seconds for one in alone)
        setting = f"{len(LINES)} strategies together / alone, temperature {temperature:g}"
        yield Ratio(f"model work: {setting}", [rounds], target)
        yield Ratio(f"wall time: {setting}", [seconds], "<= 0.33")
