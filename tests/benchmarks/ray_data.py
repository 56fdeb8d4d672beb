"""Tokens a second of a run on Ray against Ray Data, which is how one would batch a model there.

Ray Data maps batches through an actor that holds the same verifier and calls `generate`. Our run has the
two actors of its default cluster, one core each; Ray Data's one verifier can use one core only. Loading
models and starting Ray counts for neither.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset
import ray
import ray.data
import torch

from pipeline.config import ModelConfig, load_job
from pipeline.data.shards import iter_shards
from pipeline.records import Setting, WorkerStats
from pipeline.run import Prepared, prepare, run
from tests.benchmarks.engine import BATCH, Prompts, generated, loaded, over
from tests.benchmarks.ratio import Ratio

RUNS = 3
EXAMPLES = 200


class ReadyTime:
    """A watcher that remembers when all models were loaded."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def started(self, rows_done: int, rows_total: int | None) -> None:
        """Nothing to note."""

    def ready(self) -> None:
        """Note the time, on the clock of files."""
        self.seconds = time.time()

    def progressed(self, rows_done: int, workers: Sequence[WorkerStats]) -> None:
        """Nothing to note."""


class Answering:
    """What Ray Data's actor does: one batch of prompts through `generate`."""

    def __init__(self, config: ModelConfig, setting: Setting) -> None:
        torch.set_num_threads(1)
        self._model = loaded(config)
        self._setting = setting

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[Any]]:
        """One row: how many tokens came out, and from when to when it took."""
        prompts = [list(map(int, prompt)) for prompt in batch["prompt_ids"]]
        started = time.perf_counter()
        tokens = generated(self._model, prompts, self._setting)
        return {"tokens": [tokens], "started": [started], "ended": [time.perf_counter()]}


def measure() -> Iterator[Ratio]:
    """Our verifier alone and our speculation, each over Ray Data with the verifier, in turns."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        rounds = [
            (with_pipeline("verifier"), with_pipeline("spec_decode"), with_ray_data())
            for _ in range(RUNS)
        ]
    finally:
        ray.shutdown()
    alone, speculative, mapped = zip(*rounds, strict=True)
    said = f"Ray Data `map_batches` with `generate`, batch {BATCH}"
    yield Ratio(f"a run with the verifier alone / {said}", over(alone, mapped), ">= 1")
    yield Ratio(f"a run with speculation / {said}", over(speculative, mapped), "-")


def with_pipeline(use: str) -> float:
    """Tokens a second of a run, from its models loaded to its last rows written."""
    watcher = ReadyTime()
    with tempfile.TemporaryDirectory() as folder:
        prepared = demo(use, Path(folder) / "run")
        run(prepared, watcher)
        files = [*(prepared.output / "rows").glob("*.parquet")]
        ended = max(file.stat().st_mtime for file in files)
        rows = pyarrow.dataset.dataset(files).to_table(columns=["output_tokens"])
    return sum(rows["output_tokens"].to_pylist()) / (ended - watcher.seconds)


def with_ray_data() -> float:
    """Tokens a second of Ray Data, from the start of its first batch to the end of its last."""
    prepared = demo("verifier", Path("unused"))
    model, setting = prepared.job.models.verifier, prepared.settings[0]
    rows = (
        ray.data.from_items([{"prompt_ids": prompt} for prompt in prompts_of(prepared)])
        .map_batches(
            Answering,
            fn_constructor_args=(model, setting),
            batch_size=BATCH,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=1),
        )
        .take_all()
    )
    seconds = max(row["ended"] for row in rows) - min(row["started"] for row in rows)
    return sum(row["tokens"] for row in rows) / seconds


def demo(use: str, output: Path) -> Prepared:
    """The demo job with one strategy, greedy."""
    job = load_job(
        "jobs/demo.yaml",
        [
            f"strategies=[{use}]",
            "decoding.temperature=0",
            f"dataset.limit={EXAMPLES}",
            "metrics=[]",
            "fleet=ray",
            f"output={output}",
        ],
    )
    return prepare(job)


def prompts_of(prepared: Prepared) -> Prompts:
    """The prompts of all examples."""
    shards = iter_shards(prepared.job.dataset, prepared.reader)
    return [list(example.prompt_ids) for shard in shards for example in shard.examples]
