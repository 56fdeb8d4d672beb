"""Small made-up runs: a good example, one that failed midway, a bad one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from pipeline.records import (
    Counts,
    Example,
    Outcome,
    RowError,
    Sampling,
    Setting,
    Shard,
    ShardResult,
    Strategy,
)
from pipeline.results.rows import FinishedShard, RowLayout, shard_table
from pipeline.results.writer import write_shard

DRAFTER, VERIFIER = Strategy("drafter"), Strategy("verifier")
OPT = Strategy("spec_cascade.opt", 0.2)
LOSSY = Strategy("lossy_spec_decode", 0.1, "tuned")
STRATEGIES = (DRAFTER, VERIFIER, OPT, LOSSY)


@dataclass(frozen=True)
class FakeMetric:
    """A metric column without the metric."""

    name: str
    description: str = "made up"
    scale: str = "0 to 1"
    higher_is_better: bool = True


COUNTS = {
    DRAFTER: Counts(drafter_calls=4),
    VERIFIER: Counts(verifier_calls=4, verifier_tokens=4, deferred=4),
    OPT: Counts(6, 2, 7, 6, 2, 1, 2, 1, 2, (1, 0, 1)),
    LOSSY: Counts(3, 1, 4, 3, 3, 0, 1, 1, 1, (0, 0, 0, 1)),
}
"""For outputs of four tokens."""

LAYOUT = RowLayout("demo", (Setting(3, 8, Sampling(0.5, top_k=4), seed=7),), STRATEGIES)


def good(example_id: str) -> Example:
    return Example(example_id, f"prompt {example_id}", ("one", "two"), (5, 6, 7))


def bad(example_id: str) -> Example:
    return Example(example_id, None, (), (), RowError("null_field", "column 'en' is null"))


def outcome(example_id: str, strategy: Strategy, repeat: int = 0) -> Outcome:
    return Outcome(example_id, repeat, strategy, (1, 2, 3, 0), "stop", COUNTS[strategy])


def failed(finished: Outcome) -> Outcome:
    """The same outcome, had it failed after its tokens."""
    error = RowError("nan_logits", "the verifier's logits are not finite")
    return replace(finished, finish_reason="error", error=error)


def shard_outcomes(shard: Shard, layout: RowLayout = LAYOUT) -> list[Outcome]:
    return [
        replace(outcome(example.example_id, strategy, repeat), setting=number)
        for example in shard.examples
        if example.error is None
        for number, setting in enumerate(layout.settings)
        for repeat in range(setting.repeats)
        for strategy in layout.strategies
    ]


def table(
    shard: Shard,
    outcomes: list[Outcome] | None = None,
    layout: RowLayout = LAYOUT,
    scores: dict[str, list[float | None]] | None = None,
) -> pa.Table:
    """The rows of a shard; each prediction is `text N`, N being the outcome's place."""
    outcomes = shard_outcomes(shard, layout) if outcomes is None else outcomes
    result = ShardResult(shard.index, tuple(outcomes), "drafter-0", "verifier-1", "node-a")
    predictions = [None if o.error else f"text {place}" for place, o in enumerate(outcomes)]
    return shard_table(layout, FinishedShard(shard, result, predictions, scores or {}))


def write_run(output: Path, layout: RowLayout = LAYOUT, shards: int = 3) -> None:
    """Shards of two good examples each."""
    for index in range(shards):
        shard = Shard(index, (good(f"{index}a"), good(f"{index}b")))
        count = len(shard_outcomes(shard, layout))
        scores = {metric.name: [0.5] * count for metric in layout.metrics}
        write_shard(output, index, table(shard, layout=layout, scores=scores))
