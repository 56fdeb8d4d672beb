"""Puts the parts together: a checked job in, a folder of rows out.

`prepare` refuses whatever can be refused without loading a weight. `run` then decodes shard by shard
and writes each as it is finished; a folder that already holds some is carried on with.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from pipeline.config import ClusterConfig, Job, JobError, load_cluster
from pipeline.data.prompts import PromptReader
from pipeline.data.shards import check_dataset, count_examples, iter_shards
from pipeline.fleet.actors import RayFleet
from pipeline.fleet.interface import Fleet, FleetPlan
from pipeline.fleet.local import LocalFleet
from pipeline.fleet.scheduler import Lease, Scheduler
from pipeline.models.determinism import is_batch_invariant, prepare_numerics
from pipeline.models.pairing import Pairing, check_pair
from pipeline.models.stopping import text_before
from pipeline.protocol.sequence import decoded, with_cascades
from pipeline.protocol.strategies import (
    KINDS,
    StrategyError,
    import_from,
    sweep,
)
from pipeline.quality.metrics import Metric, load_metrics, score
from pipeline.records import Outcome, Setting, StepTimes, Strategy, WorkerStats
from pipeline.results.lock import locked
from pipeline.results.manifest import check_same_run, make_manifest, write_manifest
from pipeline.results.rows import FinishedShard, InvariantError, RowLayout, shard_table
from pipeline.results.timeline import write_timeline
from pipeline.results.writer import count_rows, finished_shards, write_shard
from pipeline.workers.transport import Transport, exact_transport, needs_all_confidences

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Prepared:
    """A job that has passed every check that needs no weights."""

    job: Job
    cluster: ClusterConfig
    strategies: tuple[Strategy, ...]
    settings: tuple[Setting, ...]
    metrics: tuple[Metric, ...]
    pairing: Pairing = field(repr=False)
    transport: Transport
    reader: PromptReader = field(repr=False)
    num_examples: int | None
    """How many examples there are; None where counting would mean reading them all."""

    @property
    def output(self) -> Path:
        """The run's folder."""
        return Path(self.job.output)

    @property
    def rows_per_example(self) -> int:
        """One for each setting, repeat and strategy."""
        return sum(setting.repeats for setting in self.settings) * len(self.strategies)


@dataclass(frozen=True)
class Finished:
    """What a run did: shards found done, shards written now, and the work of each worker."""

    shards_found: int
    shards_written: int
    seconds: float
    workers: tuple[WorkerStats, ...]
    decoding_seconds: float = 0.0
    """From all models loaded to the last shard written."""
    retries: int = 0
    """Shards that failed and were dealt again."""

    @property
    def efficiency(self) -> float:
        """Busy share of the busiest worker while decoding."""
        busiest = max(worker.busy_seconds for worker in self.workers)
        return busiest / self.decoding_seconds if self.decoding_seconds else 0.0


class Watcher(Protocol):
    """Who is told how a run goes. Rows are outcomes decoded, also those not yet written."""

    def started(self, rows_done: int, rows_total: int | None) -> None:
        """The workers are about to be started."""

    def ready(self) -> None:
        """All models are loaded."""

    def progressed(self, rows_done: int, workers: Sequence[WorkerStats]) -> None:
        """Called twice a second."""


def prepare(job: Job) -> Prepared:
    """Check everything about a job that needs no weights, the cheapest first.

    Raises:
        JobError: in one sentence that names the field and the remedy.
    """
    strategies = expand_strategies(job)
    cluster = load_cluster(job.cluster)
    metrics = load_metrics(job.metrics)
    if metrics and job.dataset.references is None:
        raise JobError(
            "dataset.references is missing; name the column that the metrics compare with, "
            "or remove the metrics"
        )
    check_dataset(job.dataset)
    pairing = check_pair(job.models)
    settings = job.decoding.settings(pairing.eos_token_ids)
    _check_greedy(strategies, settings)
    reader = PromptReader(
        job.dataset,
        pairing.tokenizer,
        needs_references=bool(metrics),
        max_prompt_tokens=_room_for_prompts(pairing, settings),
    )
    return Prepared(
        job=job,
        cluster=cluster,
        strategies=strategies,
        settings=settings,
        metrics=metrics,
        pairing=pairing,
        transport=_transport(job, strategies, settings, pairing),
        reader=reader,
        num_examples=count_examples(job.dataset),
    )


def expand_strategies(job: Job) -> tuple[Strategy, ...]:
    """The strategies of all lines, sweeps spread out. Raises `JobError`; none may stand twice."""
    import_from(str(Path.cwd()))
    strategies: list[Strategy] = []
    for number, line in enumerate(job.strategies):
        try:
            found = sweep(line.use, line.model_dump(exclude={"use"}))
        except StrategyError as error:
            raise JobError(f"strategies.{number}.{error}") from error
        for strategy in found:
            if strategy in strategies:
                raise JobError(f"strategies.{number}: {strategy.label} stands twice; remove one")
            strategies.append(strategy)
    return tuple(strategies)


def run(prepared: Prepared, watcher: Watcher, timeline: Path | None = None) -> Finished:
    """Decode what is not yet written.

    Args:
        timeline: where to write what each worker did when, as a Chrome trace.

    Raises:
        JobError: the folder belongs to another job, or another run works in it.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, which clusters send; finished shards are kept.
    """
    with locked(prepared.output):
        return _run_alone(prepared, watcher, timeline)


def _run_alone(prepared: Prepared, watcher: Watcher, timeline: Path | None) -> Finished:
    prepare_numerics()
    manifest = make_manifest(prepared.job, {"batch_invariant": is_batch_invariant()})
    check_same_run(prepared.output, manifest)
    write_manifest(prepared.output, manifest)
    try:
        return asyncio.run(_run(prepared, watcher, timeline))
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error


async def _run(prepared: Prepared, watcher: Watcher, timeline: Path | None) -> Finished:
    loop = asyncio.get_running_loop()
    started = loop.time()
    _stop_on_sigterm()
    found = finished_shards(prepared.output)
    rows_found, total = _rows_found(prepared, len(found)), None
    if prepared.num_examples is not None:
        total = prepared.num_examples * prepared.rows_per_example
    watcher.started(rows_found, total)
    written = examples = 0
    shards = iter_shards(prepared.job.dataset, prepared.reader, skip=found)
    first = next(shards, None)
    if first is None:  # nothing is left, so no model is loaded
        _check_complete(prepared, found, 0, 0)
        return Finished(len(found), 0, loop.time() - started, ())
    async with _fleet(prepared, timeline is not None) as fleet:
        _stop_on_sigterm()  # again: Ray's start puts a handler of its own in place
        times = await _step_times(prepared, fleet)
        watcher.ready()
        ready = loop.time()
        watch = asyncio.create_task(_watch(fleet, watcher, rows_found))
        try:
            scheduler = Scheduler(fleet.drafters, prepared.cluster.failure.attempts)
            async for lease in scheduler.leases(itertools.chain([first], shards)):
                await asyncio.to_thread(_write, prepared, lease, times)
                written += 1
                examples += len(lease.shard.examples)
        finally:
            watch.cancel()
        decoding = loop.time() - ready
        workers = tuple(await fleet.stats())
        if timeline is not None:
            write_timeline(timeline, await fleet.timeline())
    _check_complete(prepared, found, written, examples)
    finished = Finished(
        len(found), written, loop.time() - started, workers, decoding, scheduler.retries
    )
    _write_workers(prepared.output, finished)
    return finished


def _stop_on_sigterm() -> None:
    if task := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _fleet(prepared: Prepared, timeline: bool) -> Fleet:
    plan = FleetPlan(
        models=prepared.job.models,
        vocabulary=prepared.pairing.vocabulary,
        strategies=decoded(prepared.strategies),
        settings=prepared.settings,
        cluster=prepared.cluster,
        trace=prepared.job.trace,
        transport=prepared.transport,
        code_folder=str(Path.cwd()),
        timeline=timeline,
    )
    return LocalFleet(plan) if prepared.job.fleet == "local" else RayFleet(plan)


async def _watch(fleet: Fleet, watcher: Watcher, rows_found: int) -> None:
    drafters = {drafter.name for drafter in fleet.drafters}
    while True:
        workers = await fleet.stats()
        decoded = sum(worker.outcomes for worker in workers if worker.name in drafters)
        watcher.progressed(rows_found + decoded, workers)
        await asyncio.sleep(_POLL_SECONDS)


async def _step_times(prepared: Prepared, fleet: Fleet) -> StepTimes:
    given = prepared.job.step_seconds
    return StepTimes(given.drafter, given.verifier) if given else await fleet.step_times()


def _write(prepared: Prepared, lease: Lease, times: StepTimes) -> None:
    """Score a finished shard and write its file."""
    outcomes = with_cascades(prepared.strategies, lease.result.outcomes)
    references = {example.example_id: example.references for example in lease.shard.examples}
    predictions = [_text(prepared, outcome) for outcome in outcomes]
    of_outcome = [references[outcome.example_id] for outcome in outcomes]
    layout = RowLayout(
        job=prepared.job.name,
        settings=prepared.settings,
        strategies=prepared.strategies,
        metrics=prepared.metrics,
        step_times=times,
        trace=prepared.job.trace,
    )
    finished = FinishedShard(
        shard=lease.shard,
        result=replace(lease.result, outcomes=outcomes),
        predictions=predictions,
        scores=score(prepared.metrics, predictions, of_outcome),
        attempts=lease.attempts,
    )
    write_shard(prepared.output, lease.shard.index, shard_table(layout, finished))


def _check_complete(prepared: Prepared, found: frozenset[int], written: int, examples: int) -> None:
    """Every shard and every row is there once. Each file was checked when it was written.

    Raises:
        InvariantError: what is missing.
    """
    there = finished_shards(prepared.output)
    if there != frozenset(range(len(found) + written)):
        raise InvariantError(f"shards {sorted(there)} are written, of {len(found) + written}")
    rows = count_rows(prepared.output)
    known = prepared.num_examples if prepared.num_examples is not None or found else examples
    if known is not None and rows != known * prepared.rows_per_example:
        raise InvariantError(
            f"{rows} rows are written, of {known} examples x {prepared.rows_per_example}"
        )


def _text(prepared: Prepared, outcome: Outcome) -> str | None:
    if outcome.error is not None:
        return None
    text = prepared.pairing.tokenizer.decode(outcome.output_ids, skip_special_tokens=True)
    return text_before(str(text), prepared.job.decoding.stop)


def _transport(
    job: Job, strategies: Sequence[Strategy], settings: Sequence[Setting], pairing: Pairing
) -> Transport:
    """What the job asks for, or the smallest that is exact. Raises `JobError` if it is not exact."""
    name = job.transport
    if name == "auto":
        return exact_transport(strategies, settings, pairing.vocabulary, job.trace)
    problem = None
    if name in {"tokens", "top_k"} and (job.trace or needs_all_confidences(strategies)):
        problem = "a trace or a rule reads all of the drafter's confidences"
    if name == "tokens" and any(setting.drafting.temperature > 0 for setting in settings):
        problem = "drafts are sampled at a temperature above 0"
    if name == "top_k" and any(setting.drafting.top_k is None for setting in settings):
        problem = "drafts are not sampled with top_k"
    if problem:
        raise JobError(f"transport is '{name}', but {problem}; set it to auto or float32")
    return name


def _check_greedy(strategies: Sequence[Strategy], settings: Sequence[Setting]) -> None:
    """A dynamic block is defined for greedy decoding alone."""
    warm = [s for s in settings if s.sampling.temperature > 0 or s.drafting.temperature > 0]
    dynamic = [strategy.use for strategy in strategies if KINDS[strategy.use].dynamic]
    if dynamic and warm:
        raise JobError(
            f"strategies: {dynamic[0]} is greedy, but decoding.temperature is "
            f"{warm[0].sampling.temperature:g}; set it to 0 or remove {dynamic[0]}"
        )


def _room_for_prompts(pairing: Pairing, settings: Sequence[Setting]) -> int | None:
    """The longest prompt that leaves room for the output and the block drafted at its end."""
    if pairing.context is None:
        return None
    longest = settings[0].max_new_tokens
    room = pairing.context - longest - max(setting.draft_length for setting in settings) - 1
    if room < 1:
        raise JobError(
            f"decoding.max_new_tokens is {longest}, but the pair holds sequences of "
            f"{pairing.context} tokens only; lower it"
        )
    return room


def _rows_found(prepared: Prepared, shards: int) -> int:
    examples = shards * prepared.job.dataset.shard_size
    if prepared.num_examples is not None:
        examples = min(examples, prepared.num_examples)
    return examples * prepared.rows_per_example


def _write_workers(output: Path, finished: Finished) -> None:
    """What the workers did physically, beside the rows: `workers.json` of the last invocation."""
    text = json.dumps(asdict(finished), indent=2)
    (output / "workers.json").write_text(text + "\n", encoding="utf-8")
