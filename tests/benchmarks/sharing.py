"""What lanes that carry many strategies save: a 40-strategy sweep against 40 single runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import ModelConfig, load_job
from pipeline.run import prepare, run
from tests.benchmarks.ratio import Ratio
from tests.fleet.test_same_rows import Silent

EXAMPLES = 32
RUNS = 3
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
    """What a run took."""

    rounds: float
    """Rounds of one lane."""
    work: float
    """Positions computed by both models, each times the bytes of its weights."""
    seconds: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.rounds + other.rounds, self.work + other.work, self.seconds + other.seconds
        )


def cost(lines: list[str], temperature: float, seed: int) -> Cost:
    """Run the demo pair with some strategies."""
    with tempfile.TemporaryDirectory() as folder:
        job = load_job(
            "jobs/demo.yaml",
            [
                f"strategies=[{', '.join(lines)}]",
                f"decoding.temperature={temperature}",
                f"decoding.seed={seed}",
                f"dataset.limit={EXAMPLES}",
                "metrics=[]",
                "fleet=local",
                f"output={Path(folder) / 'run'}",
                "step_seconds={drafter: 1, verifier: 1}",
            ],
        )
        finished = run(prepare(job), Silent())
    workers = {worker.name: worker for worker in finished.workers}
    work = sum(
        (worker.positions_stepped + worker.positions_prefilled) * weight
        for worker, weight in (
            (workers["drafter-0"], weights(job.models.drafter)),
            (workers["verifier-0"], weights(job.models.verifier)),
        )
    )
    return Cost(workers["drafter-0"].lane_rounds, work, finished.decoding_seconds)


def weights(model: ModelConfig) -> int:
    """Bytes of a model's weights."""
    return sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors"))


def measure() -> Iterator[Ratio]:
    """The sweep over the sum of the single runs, at two temperatures."""
    for temperature, target in ((1.0, "<= 0.30"), (0.0, "<= 0.18")):
        ratios: list[Cost] = []
        for seed in range(RUNS):
            together = cost(LINES, temperature, seed)
            alone = sum((cost([line], temperature, seed) for line in LINES), Cost(0, 0, 0))
            ratios.append(
                Cost(
                    together.rounds / alone.rounds,
                    together.work / alone.work,
                    together.seconds / alone.seconds,
                )
            )
        setting = f"{len(LINES)} strategies together / alone, temperature {temperature:g}"
        yield Ratio(f"rounds: {setting}", [ratio.rounds for ratio in ratios], target)
        yield Ratio(f"model work: {setting}", [ratio.work for ratio in ratios], target)
        yield Ratio(f"decoding time: {setting}", [ratio.seconds for ratio in ratios], "<= 0.33")
