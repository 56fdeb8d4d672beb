"""Puts the parts together: a checked job in, a folder of rows out.

`prepare` refuses whatever can be refused without loading a weight. `run` then decodes shard by shard
and writes each as it is finished; a folder that already holds some is carried on with.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

from pipeline.config import (
    ClusterConfig,
    DrafterRole,
    Job,
    JobError,
    ModelConfig,
    StrategyConfig,
    VerifierRole,
    all_of,
    load_cluster,
)
from pipeline.data.prompts import PromptReader
from pipeline.data.shards import check_dataset, count_examples, iter_shards
from pipeline.fleet.interface import Fleet, FleetPlan
from pipeline.fleet.local import LocalFleet
from pipeline.fleet.ray_fleet import RayFleet
from pipeline.fleet.scheduler import Lease, Scheduler
from pipeline.models.determinism import is_batch_invariant, prepare_numerics
from pipeline.models.pairing import Pairing, check_pair, count_gpus
from pipeline.models.stopping import text_before
from pipeline.protocol.custom_code import import_from
from pipeline.protocol.sequence import decoded, with_cascades
from pipeline.protocol.strategies import (
    KINDS,
    StrategyError,
    sweep,
)
from pipeline.quality.metrics import Metric, load_metrics, score
from pipeline.records import Outcome, Setting, StepTimes, Strategy, WorkerStats
from pipeline.results.containment import check_contained
from pipeline.results.errors import ENOUGH_EXAMPLES, ErrorTally, check_share, tally_of
from pipeline.results.lock import locked
from pipeline.results.manifest import check_same_run, make_manifest, write_manifest
from pipeline.results.output import writing
from pipeline.results.rows import FinishedShard, InvariantError, RowLayout, shard_table
from pipeline.results.schema import row_schema
from pipeline.results.timeline import write_timeline
from pipeline.results.writer import count_rows, finished_shards, remove_drafts, write_shard
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
    restarts: int = 0
    """Workers that died or hung and were started again."""

    @property
    def efficiency(self) -> float:
        """Busy share of the busiest worker while decoding."""
        busiest = max((worker.busy_seconds for worker in self.workers), default=0.0)
        return busiest / self.decoding_seconds if self.decoding_seconds else 0.0


class Watcher(Protocol):
    """Who is told how a run goes. Rows are outcomes decoded, also those not yet written."""

    def started(self, rows_done: int, rows_total: int | None) -> None:
        """The workers are about to be started."""

    def ready(self) -> None:
        """All models are loaded."""

    def progressed(self, rows_done: int, workers: Sequence[WorkerStats]) -> None:
        """Called twice a second."""


class JobParts:
    """What a job is made of, each part checked when it is first asked for. All raise `JobError`."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @cached_property
    def strategies(self) -> tuple[Strategy, ...]:
        """All strategies, sweeps spread out."""
        return expand_strategies(self.job)

    @cached_property
    def cluster(self) -> ClusterConfig:
        """Where the workers go."""
        return load_cluster(self.job.cluster)

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """What outputs are scored with."""
        return load_metrics(self.job.metrics, self.job.allow_custom_code)

    @cached_property
    def pairing(self) -> Pairing:
        """What the two models share."""
        return check_pair(self.job.models)

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """The settings to decode with."""
        return self.job.decoding.settings(self.pairing.eos_token_ids)

    @cached_property
    def reader(self) -> PromptReader:
        """Makes examples of rows."""
        return PromptReader(
            self.job.dataset,
            self.pairing.tokenizer,
            needs_references=bool(self.metrics),
            max_prompt_tokens=_room_for_prompts(self.pairing, self.settings),
            kept_end="first" if self.pairing.has_encoder else "last",
        )

    @cached_property
    def transport(self) -> Transport:
        """How draft blocks cross."""
        return _transport(self.job, self.strategies, self.settings, self.pairing)

    def prepared(self) -> Prepared:
        """All of them together."""
        return Prepared(
            job=self.job,
            cluster=self.cluster,
            strategies=self.strategies,
            settings=self.settings,
            metrics=self.metrics,
            pairing=self.pairing,
            transport=self.transport,
            reader=self.reader,
            num_examples=count_examples(self.job.dataset),
        )


Check = Callable[[JobParts], object]

CHECKS: tuple[Check, ...] = (
    lambda parts: parts.strategies,
    lambda parts: _check_output(Path(parts.job.output)),
    lambda parts: parts.cluster,
    lambda parts: _check_numbers(parts.job, parts.cluster),
    lambda parts: _check_devices(parts.job, parts.cluster),
    lambda parts: row_schema(parts.metrics),
    lambda parts: _check_references(parts.job, parts.metrics),
    lambda parts: check_dataset(parts.job.dataset),
    lambda parts: parts.pairing,
    lambda parts: _check_greedy(parts.strategies, parts.settings),
    lambda parts: parts.reader,
    lambda parts: parts.transport,
)
"""All that is checked of a job before a weight is loaded, the cheapest first."""


def prepare(job: Job) -> Prepared:
    """Check everything about a job that needs no weights.

    Raises:
        JobError: in one sentence that names the field and the remedy.
    """
    parts = JobParts(job)
    for check in CHECKS:
        check(parts)
    return parts.prepared()


def expand_strategies(job: Job) -> tuple[Strategy, ...]:
    """The strategies of all lines, sweeps spread out. Raises `JobError`; none may stand twice."""
    import_from(_code_folder(job))
    lines = all_of([partial(_of_line, *numbered) for numbered in enumerate(job.strategies)])
    strategies: list[Strategy] = []
    for number, found in enumerate(lines):
        for strategy in found:
            if strategy in strategies:
                raise JobError(f"strategies.{number}: {strategy.label} stands twice; remove one")
            strategies.append(strategy)
    return tuple(strategies)


def _of_line(number: int, line: StrategyConfig) -> list[Strategy]:
    """The strategies of one line. Raises `JobError`."""
    try:
        return sweep(line.use, line.model_dump(exclude={"use"}))
    except StrategyError as error:
        raise JobError(f"strategies.{number}.{error}") from error


def _code_folder(job: Job) -> str:
    """Where custom targets are imported from; empty in a job without them. Raises `JobError`."""
    custom = [number for number, line in enumerate(job.strategies) if line.use == "custom"]
    if custom and not job.allow_custom_code:
        raise JobError(
            f"strategies.{custom[0]}: a custom target is code in the working directory; set "
            "allow_custom_code: true if it may be run"
        )
    return str(Path.cwd()) if custom else ""


def run(prepared: Prepared, watcher: Watcher, timeline: Path | None = None) -> Finished:
    """Decode what is not yet written.

    Args:
        timeline: where to write what each worker did when, as a Chrome trace.

    Raises:
        JobError: the folder belongs to another job, another run works in it, or workers cannot start.
        ErrorShareError: more rows have errors than `max_error_share`; finished shards are kept.
        FleetLostError, OutputError: it ended before its time; finished shards are kept.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, which clusters send; finished shards are kept.
    """
    check_contained(prepared.output)
    with locked(prepared.output):
        finished = _run_alone(prepared, watcher, timeline)
        check_share(tally_of(prepared.output), prepared.job.max_error_share)
        return finished


def _run_alone(prepared: Prepared, watcher: Watcher, timeline: Path | None) -> Finished:
    prepare_numerics()
    manifest = make_manifest(prepared.job, {"batch_invariant": is_batch_invariant()})
    check_same_run(prepared.output, manifest)
    with writing(prepared.output):
        remove_drafts(prepared.output)
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
        times = await _step_times(prepared, fleet)
        watcher.ready()
        ready = loop.time()
        watch = asyncio.create_task(_watch(fleet, watcher, rows_found, total))
        try:
            tally = ErrorTally()
            scheduler = Scheduler(fleet.drafters, prepared.cluster.failure.attempts)
            # Closed before the workers end, so that nobody tries to start those again.
            async with aclosing(scheduler.leases(itertools.chain([first], shards))) as leases:
                async for lease in leases:
                    await asyncio.to_thread(_write, prepared, lease, times, tally)
                    written += 1
                    examples += len(lease.shard.examples)
                    if examples >= ENOUGH_EXAMPLES:
                        check_share(tally, prepared.job.max_error_share)
        finally:
            watch.cancel()
        decoding = loop.time() - ready
        workers = tuple(await fleet.stats())
        if timeline is not None:
            write_timeline(timeline, await fleet.timeline())
    _check_complete(prepared, found, written, examples)
    finished = Finished(
        len(found),
        written,
        loop.time() - started,
        workers,
        decoding,
        scheduler.retries,
        fleet.restarts,
    )
    _write_workers(prepared.output, finished)
    return finished


def _stop_on_sigterm() -> None:
    if task := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _fleet(prepared: Prepared, timeline: bool) -> Fleet:
    plan = fleet_plan(prepared, timeline)
    return LocalFleet(plan) if prepared.job.fleet == "local" else RayFleet(plan)


def fleet_plan(prepared: Prepared, timeline: bool = False) -> FleetPlan:
    """What the workers of a job are built from."""
    return FleetPlan(
        models=prepared.job.models,
        vocabulary=prepared.pairing.vocabulary,
        strategies=decoded(prepared.strategies),
        settings=prepared.settings,
        cluster=prepared.cluster,
        trace=prepared.job.trace,
        transport=prepared.transport,
        code_folder=_code_folder(prepared.job),
        timeline=timeline,
    )


async def _watch(fleet: Fleet, watcher: Watcher, rows_found: int, total: int | None) -> None:
    drafters = {drafter.name for drafter in fleet.drafters}
    while True:
        workers = await fleet.stats()
        decoded = sum(worker.outcomes for worker in workers if worker.name in drafters)
        # What a drafter had decoded of a shard when it died is decoded, and counted, again.
        rows = rows_found + decoded
        watcher.progressed(rows if total is None else min(rows, total), workers)
        await asyncio.sleep(_POLL_SECONDS)


async def _step_times(prepared: Prepared, fleet: Fleet) -> StepTimes:
    given = prepared.job.step_seconds
    return StepTimes(given.drafter, given.verifier) if given else await fleet.step_times()


def _write(prepared: Prepared, lease: Lease, times: StepTimes, tally: ErrorTally) -> None:
    """Score a finished shard, write its file and count its errors."""
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
    rows = shard_table(layout, finished)
    write_shard(prepared.output, lease.shard.index, rows)
    tally.add(rows)


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


def _check_output(output: Path) -> None:
    """Refuse a folder that cannot be made or written to, without making it."""
    try:
        there = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    except OSError as error:
        raise JobError(
            f"output is '{output}', which cannot be reached: {error.strerror}"
        ) from error
    if not there.is_dir():
        raise JobError(f"output is '{output}', but {there} is a file; choose a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise JobError(f"output is '{output}', but {there} cannot be written to; choose another")


def _check_numbers(job: Job, cluster: ClusterConfig) -> None:
    """Only a Ray fleet has a cluster to count."""
    for name, role in (("drafter", cluster.drafter), ("verifier", cluster.verifier)):
        if job.fleet == "local" and role.replicas == "auto":
            raise JobError(
                f"{job.cluster}: {name}.replicas is 'auto', but a local fleet has no cluster to count; "
                "give a number, or set fleet to ray"
            )


def _check_references(job: Job, metrics: Sequence[Metric]) -> None:
    if metrics and job.dataset.references is None:
        raise JobError(
            "dataset.references is missing; name the column that the metrics compare with, "
            "or remove the metrics"
        )


def _check_devices(job: Job, cluster: ClusterConfig) -> None:
    """An actor sees the GPUs that it is given, counted from 0; this process sees all there are."""
    roles: dict[str, tuple[ModelConfig, DrafterRole | VerifierRole]] = {
        "drafter": (job.models.drafter, cluster.drafter),
        "verifier": (job.models.verifier, cluster.verifier),
    }
    for name, (model, role) in roles.items():
        given = count_gpus() if job.fleet == "local" else math.ceil(role.num_gpus)
        where = "this machine" if job.fleet == "local" else f"{job.cluster} ({name}.num_gpus)"
        if model.device.startswith("cuda") and int(model.device.partition(":")[2] or 0) >= given:
            raise JobError(
                f"models.{name}.device is '{model.device}', but {where} gives it {given} GPUs; set it to "
                "auto, which takes the GPU where there is one"
            )
        if model.compile and model.device == "auto" and role.num_gpus > 1:
            raise JobError(
                f"models.{name}.compile is true, but {job.cluster} ({name}.num_gpus) deals the model to "
                f"{role.num_gpus:g} GPUs, which cannot be compiled; set it to false"
            )


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


def workers_file(output: Path) -> Path:
    """Where a run leaves the accounts of its workers."""
    return output / "workers.json"


def _write_workers(output: Path, finished: Finished) -> None:
    """What the workers did physically, beside the rows: `workers.json` of the last invocation."""
    text = json.dumps(asdict(finished), indent=2)
    with writing(output):
        workers_file(output).write_text(text + "\n", encoding="utf-8")
