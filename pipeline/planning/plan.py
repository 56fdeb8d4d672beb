"""Puts a plan together: a job in, all that can be said of its run out. No weight is loaded."""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.config import ClusterConfig, DrafterRole, Job, JobError, VerifierRole
from pipeline.fleet.connection import connected
from pipeline.fleet.interface import FleetPlan
from pipeline.fleet.placement import (
    Bundle,
    Node,
    bundles_of,
    check_fit,
    nodes_free,
    nodes_there,
    settled,
)
from pipeline.models.sizes import ModelSize, model_size
from pipeline.planning.balance import Advice, Steps, advise
from pipeline.planning.calls import Assumed, Calls, expected_calls, rounds_per_text
from pipeline.planning.memory import Load, Memory, memory_of
from pipeline.planning.problems import Problem, doubts, refusals
from pipeline.planning.prompts import Prompts, first_prompts
from pipeline.planning.rounds import (
    Rounds,
    draft_length,
    earlier_run,
    measured,
    predicted,
    texts_of,
)
from pipeline.planning.simulation import Forecast
from pipeline.planning.traffic import Round, request_bytes
from pipeline.protocol.strategies import KINDS
from pipeline.run import JobParts, Prepared, fleet_plan

ACCEPTANCE = 0.6
"""What is assumed where nothing is known. The paper's pairs accept 0.4 to 0.8 of what they draft."""


_ANSWER_SECONDS = 5


@dataclass(frozen=True)
class Options:
    """What the user says beside the job."""

    steps: Steps | None = None
    acceptance: float | None = None
    measure: bool = False
    """Load the models and decode some examples here."""
    address: str | None = None
    """A running Ray cluster; None is RAY_ADDRESS, and without that none is asked."""


@dataclass(frozen=True)
class Group:
    """Actors that are given the same."""

    role: str
    bundle: Bundle
    """Of the first of them."""
    count: int
    nodes: Mapping[int, int]
    """How many of them would fit which node, by its number from 1; empty where no cluster was asked."""
    memory: Memory
    """Of each."""

    @property
    def gpu_bytes(self) -> float:
        """What lies on a GPU: a part of a worker that has several, or all workers that share one."""
        gpus = self.bundle.resources.get("GPU", 0)
        if not gpus:
            return 0
        return self.memory.total / gpus if gpus >= 1 else self.memory.total * int(1 / gpus)


@dataclass(frozen=True)
class Cost:
    """What a run is expected to cost, whatever its workers take for it."""

    assumed: Assumed
    is_found: bool
    """Whether that was found in the rows of an earlier run."""
    calls: tuple[Calls, ...]
    texts: int | None
    """Of all decoded strategies, settings and repeats; None if the number of examples is not known."""
    rows: int | None
    """The same of all strategies, also those whose texts are those of others."""
    rounds_per_text: float
    block: Round
    block_bytes: int
    """Sent to a verifier in a round of a full bank in which each lane has one strategy; 0 without one."""


@dataclass(frozen=True)
class Throughput:
    """How fast the fleet is, and what would be better."""

    rounds: Rounds
    forecast: Forecast
    """Of the whole run; of a long one where its number of examples is not known."""
    advice: Advice | None
    """None for a job that asks one model only."""
    texts_per_second: float


@dataclass(frozen=True)
class Details:
    """What can be said of a job that a run would not refuse."""

    prepared: Prepared
    prompts: Prompts
    groups: tuple[Group, ...]
    cost: Cost
    throughput: Throughput | None


@dataclass(frozen=True)
class Plan:
    """The problems of a job and, if a run would accept it, the details."""

    job: Job
    problems: tuple[Problem, ...]
    details: Details | None = None


def make_plan(job: Job, options: Options) -> Plan:
    """Look at a job from all sides. What is wrong with it is part of the plan, and not raised."""
    parts = JobParts(job)
    problems = refusals(parts)
    if problems:
        return Plan(job, tuple(problems))
    try:
        prepared, nodes = _on_cluster(parts.prepared(), options.address)
    except JobError as error:
        return Plan(job, tuple(Problem(str(one)) for one in error.all))
    bundles = bundles_of(prepared.cluster)
    places: dict[str, int] = {}
    if nodes is not None and not prepared.cluster.autoscaling_seconds:
        try:
            places = check_fit(bundles, prepared.cluster.placement, nodes)
        except JobError as error:
            problems.append(Problem(str(error)))
    sizes = {
        "drafter": model_size(job.models.drafter),
        "verifier": model_size(job.models.verifier),
    }
    prompts = first_prompts(prepared)
    problems.extend(doubts(prepared, sizes, prompts))
    plan = fleet_plan(prepared)
    calls = plan.all_verifiers()
    cost = _cost(prepared, plan, options)
    details = Details(
        prepared,
        prompts,
        _groups(prepared, sizes, bundles, places, _loads(prepared, plan, calls, prompts)),
        cost,
        _throughput(prepared, cost, calls, options, all(_asks(plan))),
    )
    return Plan(job, tuple(problems), details)


def _on_cluster(prepared: Prepared, address: str | None) -> tuple[Prepared, list[Node] | None]:
    """The nodes of a running cluster, and the job with a number in place of `auto` replicas.

    Raises:
        JobError: there is no cluster at the address, or `auto` finds no room or no cluster.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if prepared.job.fleet == "local" or not address or address == "local":
        _check_counted(prepared.cluster)
        return prepared, None
    _check_answered(address)
    with connected(address):
        nodes, free = nodes_there(), nodes_free()
    return replace(prepared, cluster=settled(prepared.cluster, free)), nodes


def _check_answered(address: str) -> None:
    """Ray itself tries for minutes where nobody listens. Names such as `auto` are left to it."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise JobError(
            f"--address (or RAY_ADDRESS) is '{address}', where no cluster answers: {error}; correct it, "
            "or give none to plan without a cluster"
        ) from error


def _check_counted(cluster: ClusterConfig) -> None:
    for name, role in (("drafter", cluster.drafter), ("verifier", cluster.verifier)):
        if role.replicas == "auto":
            raise JobError(
                f"{name}.replicas is 'auto', so the plan needs the cluster; give --address or set "
                "RAY_ADDRESS"
            )


def _asks(plan: FleetPlan) -> tuple[bool, bool]:
    """Whether the job asks the drafter, and whether it asks the verifier."""
    kinds = [KINDS[strategy.use] for strategy in plan.strategies]
    return (
        plan.trace or any(kind.uses_drafter for kind in kinds),
        plan.trace or any(kind.uses_verifier for kind in kinds),
    )


# --- who holds what ------------------------------------------------------------------------------------


def _loads(
    prepared: Prepared, plan: FleetPlan, calls: Sequence[Sequence[int]], prompts: Prompts
) -> dict[str, Load]:
    """What a worker of each role holds at most. A model that no strategy asks has no caches."""
    drafts, verifies = _asks(plan)
    shared = Counter(verifier for banks in calls for verifier in banks)
    load = Load(
        banks=prepared.cluster.banks if drafts else 0,
        slots=prepared.cluster.drafter.slots,
        block=max(setting.draft_length for setting in prepared.settings),
        prompt=prompts.longest,
        written=prepared.settings[0].max_new_tokens,
        vocabulary=prepared.pairing.vocabulary,
    )
    verifying = replace(load, banks=max(shared.values()) if verifies else 0)
    return {"drafter": load, "verifier": verifying}


def _groups(
    prepared: Prepared,
    sizes: Mapping[str, ModelSize],
    bundles: Sequence[Bundle],
    places: Mapping[str, int],
    loads: Mapping[str, Load],
) -> tuple[Group, ...]:
    roles: dict[str, DrafterRole | VerifierRole] = {
        "drafter": prepared.cluster.drafter,
        "verifier": prepared.cluster.verifier,
    }
    groups = []
    for name, role in roles.items():
        own = [bundle for bundle in bundles if bundle.actor.startswith(name)]
        nodes = Counter(places[bundle.actor] + 1 for bundle in own if bundle.actor in places)
        memory = memory_of(name, sizes[name], loads[name])
        groups.append(Group(name, own[0], role.count, nodes, memory))
    return tuple(groups)


# --- what it costs -------------------------------------------------------------------------------------


def _cost(prepared: Prepared, plan: FleetPlan, options: Options) -> Cost:
    found = texts_of(prepared.output)
    longest = float(prepared.settings[0].max_new_tokens)
    assumed = found or Assumed(ACCEPTANCE, longest)
    if options.acceptance is not None:
        assumed = replace(assumed, acceptance=options.acceptance)
    texts = rows = None
    if prepared.num_examples is not None:
        rows = prepared.num_examples * prepared.rows_per_example
        texts = rows // len(prepared.strategies) * len(plan.strategies)
    slots = prepared.cluster.drafter.slots
    widest = max(prepared.settings, key=lambda setting: setting.draft_length)
    drafts, verifies = _asks(plan)
    block = Round(
        lanes=slots,
        columns=widest.draft_length if drafts else 0,
        pairs=slots,
        vocabulary=prepared.pairing.vocabulary,
        top_k=widest.drafting.top_k,
    )
    return Cost(
        assumed,
        found is not None,
        expected_calls(prepared.strategies, prepared.settings, assumed),
        texts,
        rows,
        rounds_per_text(prepared.settings, assumed),
        block,
        request_bytes(prepared.transport if drafts else "tokens", block) if verifies else 0,
    )


# --- how fast it is ------------------------------------------------------------------------------------


def _throughput(
    prepared: Prepared,
    cost: Cost,
    calls: Sequence[Sequence[int]],
    options: Options,
    asks_both: bool,
) -> Throughput | None:
    # Given steps are those of two models in turn; one that works alone has rounds of another kind.
    rounds = _rounds(prepared, options if asks_both else replace(options, steps=None), asks_both)
    if rounds is None:
        return None
    known = rounds.rounds_per_text if options.acceptance is None else None
    texts_in_round = rounds.lanes * rounds.sharing / (known or cost.rounds_per_text)
    texts = _LONG if cost.texts is None else cost.texts
    forecast = predicted(
        rounds.steps,
        draft_length(prepared),
        calls,
        prepared.cluster.verifier.count,
        math.ceil(texts / texts_in_round),
    )
    block = round(sum(s.block_size for s in prepared.settings) / len(prepared.settings))
    return Throughput(
        rounds,
        forecast,
        advise(rounds.steps, cost.assumed.acceptance, block) if asks_both else None,
        forecast.rounds_per_second * texts_in_round,
    )


_LONG = 1_000_000
"""Texts of a run whose examples nobody counted."""


def _rounds(prepared: Prepared, options: Options, asks_both: bool) -> Rounds | None:
    """From the options, else measured, else from the job, else from an earlier run."""
    slots = float(prepared.cluster.drafter.slots)
    earlier = earlier_run(prepared)
    known = earlier or Rounds(Steps(0, 0), "", slots)
    if options.steps is not None:
        steps = replace(options.steps, transfer=known.steps.transfer)
        return replace(known, steps=steps, source="the options")
    if options.measure:
        return measured(prepared)
    given = prepared.job.step_seconds
    if given is not None and asks_both:
        steps = Steps(given.drafter, given.verifier, known.steps.transfer)
        return replace(known, steps=steps, source="step_seconds of the job, which are of one lane")
    return earlier
