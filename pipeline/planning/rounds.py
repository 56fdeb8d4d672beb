"""What a round of a bank takes: given, found in the output folder of an earlier run, or measured here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.data.shards import iter_shards
from pipeline.fleet.interface import FleetPlan
from pipeline.fleet.local import LocalFleet
from pipeline.fleet.scheduler import Scheduler
from pipeline.planning.balance import Steps
from pipeline.planning.calls import Assumed
from pipeline.planning.simulation import Forecast, Pipeline, forecast
from pipeline.protocol.strategies import KINDS, Execution
from pipeline.records import WorkerStats
from pipeline.results.writer import finished_shards, read_rows
from pipeline.run import Prepared, fleet_plan, workers_file

SPREAD = 0.5
"""Standard deviation of a worker's work on a round over its mean, where only the mean is known.

Rounds differ in lanes, in strategies and in prompts to read. Timelines of the g2p pair on two cores
that others worked on, too, had 0.5 for verifiers and 0.65 for drafters.
"""


@dataclass(frozen=True)
class Rounds:
    """The rounds of a job's banks: how long they take, and how much they get done."""

    steps: Steps
    source: str
    """How this is known, as a sentence needs it."""
    lanes: float
    """In a round, in the mean."""
    sharing: float = 1.0
    """Texts that ride in a lane, in the mean: strategies that so far agree."""
    rounds_per_text: float | None = None
    """None where it is not known, but follows from an assumed acceptance."""
    count: int = 0
    """Rounds that this was found on."""
    sent: float = 0.0
    """Bytes sent to the verifier in a round, in the mean."""


def rounds_of(
    workers: Sequence[WorkerStats], draft_length: float, source: str, is_local: bool = False
) -> Rounds | None:
    """The mean of what workers did; None if they did nothing.

    Args:
        draft_length: tokens of a full block, in the mean over settings.
        is_local: whether all ran in one process, one after the other. What a block then spent outside
            the workers is no transfer: it waited for the process.
    """
    drafters = [worker for worker in workers if worker.name.startswith("drafter")]
    verifiers = [worker for worker in workers if worker.name.startswith("verifier")]
    rounds, outcomes, lanes, pairs, sent = (
        sum(getattr(worker, name) for worker in drafters)
        for name in ("rounds", "outcomes", "lane_rounds", "pair_rounds", "bytes_sent")
    )
    if not rounds or not outcomes:
        return None
    transfer = 0.0 if is_local else sum(worker.transfer_seconds for worker in drafters)
    steps = Steps(
        sum(worker.busy_seconds for worker in drafters) / rounds / draft_length,
        sum(worker.busy_seconds for worker in verifiers) / rounds,
        transfer / rounds,
    )
    return Rounds(
        steps, source, lanes / rounds, pairs / lanes, pairs / outcomes, rounds, sent / rounds
    )


def draft_length(prepared: Prepared) -> float:
    """Tokens of a full draft block, in the mean over settings."""
    return sum(setting.draft_length for setting in prepared.settings) / len(prepared.settings)


def earlier_run(prepared: Prepared) -> Rounds | None:
    """What a run of the same job left in its folder.

    None if there was none, it decoded nothing, or its accounts are not those of this version.
    """
    try:
        found = json.loads(workers_file(prepared.output).read_text("utf-8"))
        workers = [WorkerStats(**one) for one in found["workers"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_local = any(worker.node == "local" for worker in workers)
    return rounds_of(workers, draft_length(prepared), f"the run in {prepared.output}", is_local)


def texts_of(output: Path) -> Assumed | None:
    """Acceptance and length of the texts that a run has written; None where nothing was judged.

    Acceptance is that of the judged positions of speculative strategies, accepted / (accepted +
    rejected), which estimates the a of Leviathan et al. (2023).
    """
    if not finished_shards(output):
        return None
    columns = read_rows(output, ["strategy", "accepted", "rejected", "output_tokens"]).to_pydict()
    rows = [row for row in zip(*columns.values(), strict=True) if None not in row]
    judged = [row for row in rows if KINDS[row[0]].execution is Execution.SPECULATIVE]
    accepted, rejected = (sum(row[column] for row in judged) for column in (1, 2))
    if not accepted + rejected:
        return None
    return Assumed(accepted / (accepted + rejected), sum(row[3] for row in rows) / len(rows))


def measured(prepared: Prepared) -> Rounds | None:
    """Decode one fleet's fill of examples here, with one worker of each role; loads both models."""
    plan = fleet_plan(prepared)
    roles = {
        name: role.model_copy(update={"replicas": 1})
        for name, role in (("drafter", plan.cluster.drafter), ("verifier", plan.cluster.verifier))
    }
    plan = replace(plan, cluster=plan.cluster.model_copy(update={**roles, "links": {}}))
    workers = asyncio.run(_decoded(plan, prepared))
    return rounds_of(workers, draft_length(prepared), "measured here", is_local=True)


async def _decoded(plan: FleetPlan, prepared: Prepared) -> list[WorkerStats]:
    examples = plan.cluster.banks * plan.cluster.drafter.slots
    dataset = prepared.job.dataset
    examples = min(examples, dataset.limit or examples)
    some = dataset.model_copy(update={"limit": examples, "shard_size": examples})
    async with LocalFleet(plan) as fleet:
        async for _ in Scheduler(fleet.drafters).leases(iter_shards(some, prepared.reader)):
            pass
        return await fleet.stats()


def predicted(
    steps: Steps, draft_length: float, calls: Sequence[Sequence[int]], verifiers: int, rounds: int
) -> Forecast:
    """How long a fleet takes for so many rounds of its banks."""
    drafting = steps.drafter * draft_length
    pipeline = Pipeline(calls, verifiers, drafting, steps.verifier, steps.transfer, SPREAD)
    return forecast(pipeline, rounds)
