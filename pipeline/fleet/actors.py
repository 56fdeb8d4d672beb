"""The fleet on Ray: each worker is an actor in its own process with its own resources.

A drafter's actor calls its verifiers' actors directly; the driver deals in shards only. Both kinds
are async actors whose model work runs in one thread of their own: while a verifier computes it
already holds the next block, which is what hides the round trip.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline.config import DrafterRole, VerifierRole
from pipeline.fleet.interface import FleetPlan
from pipeline.fleet.placement import bundles_of, place
from pipeline.models.determinism import prepare_numerics
from pipeline.models.memory import keep_freed_memory
from pipeline.records import Shard, ShardResult, Span, StepTimes, WorkerStats
from pipeline.workers.engine import VerifierLink
from pipeline.workers.wire import VerifyReply, VerifyRequest

Result = TypeVar("Result")


class _ModelThread:
    """One thread for all model work of an actor, so that its event loop always answers."""

    def __init__(self, num_cpus: float) -> None:
        # Thread counts belong to the thread that computes.
        threads = max(1, int(num_cpus))
        self._executor = ThreadPoolExecutor(1, initializer=prepare_numerics, initargs=(threads,))

    async def __call__(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


class VerifierActor:
    """A verifier in its own process."""

    def __init__(self, name: str, plan: FleetPlan) -> None:
        prepare_numerics()
        keep_freed_memory()
        compute = _ModelThread(plan.cluster.verifier.num_cpus)
        self._engine = plan.verifier_engine(name, compute, _node())

    async def ready(self) -> int:
        """The process id, when the model is loaded."""
        return os.getpid()

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        """Judge a block."""
        return await self._engine.verify(request)

    async def stats(self) -> WorkerStats:
        """What it did so far."""
        return self._engine.ledger.stats

    async def spans(self) -> list[Span]:
        """All that it did."""
        return self._engine.ledger.spans

    async def step_seconds(self) -> float:
        """Seconds of one of its passes at batch 1."""
        return await self._engine.step_seconds()


class DrafterActor:
    """A drafter in its own process, linked to the verifiers it calls."""

    def __init__(
        self, name: str, plan: FleetPlan, verifiers: Sequence[tuple[str, ActorHandle]]
    ) -> None:
        prepare_numerics()
        keep_freed_memory()
        links = [VerifierLink(other, partial(_verify, handle)) for other, handle in verifiers]
        compute = _ModelThread(plan.cluster.drafter.num_cpus)
        self._engine = plan.drafter_engine(name, links, compute, _node())

    async def ready(self) -> int:
        """The process id, when the model is loaded."""
        return os.getpid()

    async def decode(self, shard: Shard) -> ShardResult:
        """All outcomes of a shard."""
        return await self._engine.decode(shard)

    async def stats(self) -> WorkerStats:
        """What it did so far."""
        return self._engine.ledger.stats

    async def spans(self) -> list[Span]:
        """All that it did."""
        return self._engine.ledger.spans

    async def step_seconds(self) -> float:
        """Seconds of one of its passes at batch 1."""
        return await self._engine.step_seconds()


class RemoteDrafter:
    """A drafter's actor as the scheduler sees it."""

    def __init__(self, name: str, actor: ActorHandle) -> None:
        self.name = name
        self.actor = actor

    async def decode(self, shard: Shard) -> ShardResult:
        """All outcomes of the shard."""
        result: ShardResult = await self.actor.decode.remote(shard)
        return result


class RayFleet:
    """Actors in a placement group. Starts a local Ray if no cluster is named.

    Args:
        address: a Ray cluster, as `ray.init` takes it; None is `RAY_ADDRESS`, else a local Ray.
    """

    def __init__(self, plan: FleetPlan, address: str | None = None) -> None:
        self._plan = plan
        self._address = address
        self._started_ray = False
        self._group: PlacementGroup | None = None
        self._verifiers: list[ActorHandle] = []
        self._drafters: list[RemoteDrafter] = []

    async def __aenter__(self) -> RayFleet:
        """Connect, place, and load all models at once."""
        try:
            await asyncio.to_thread(self._connect)
            self._group = await asyncio.to_thread(place, self._plan.cluster)
            self._create()
            await asyncio.gather(*(actor.ready.remote() for actor in self._actors()))
        except BaseException:
            self._release()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill the actors and return their resources."""
        self._release()

    @property
    def drafters(self) -> Sequence[RemoteDrafter]:
        """The drafters to lease shards to."""
        return self._drafters

    async def stats(self) -> list[WorkerStats]:
        """What each worker did so far."""
        return list(await asyncio.gather(*(actor.stats.remote() for actor in self._actors())))

    async def timeline(self) -> list[Span]:
        """All that the workers did."""
        parts = await asyncio.gather(*(actor.spans.remote() for actor in self._actors()))
        return [span for part in parts for span in part]

    async def step_times(self) -> StepTimes:
        """Measured on the first drafter and the first verifier, one after the other."""
        drafting = await self._drafters[0].actor.step_seconds.remote()
        return StepTimes(drafting, await self._verifiers[0].step_seconds.remote())

    def _actors(self) -> list[ActorHandle]:
        return [drafter.actor for drafter in self._drafters] + self._verifiers

    def _connect(self) -> None:
        if not ray.is_initialized():
            ray.init(
                address=self._address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
            )
            self._started_ray = True

    def _create(self) -> None:
        places = {
            bundle.actor: index for index, bundle in enumerate(bundles_of(self._plan.cluster))
        }
        plan = self._plan
        for name in plan.verifier_names():
            options = self._options(places[name], plan.cluster.verifier)
            actor = ray.remote(VerifierActor).options(**options).remote(name, plan)
            self._verifiers.append(actor)
        for index, name in enumerate(plan.drafter_names()):
            numbers = plan.verifiers_of(index)
            links = [(f"verifier-{number}", self._verifiers[number]) for number in numbers]
            options = self._options(places[name], plan.cluster.drafter)
            actor = ray.remote(DrafterActor).options(**options).remote(name, plan, links)
            self._drafters.append(RemoteDrafter(name, actor))

    def _options(self, bundle: int, role: DrafterRole | VerifierRole) -> dict[str, Any]:
        return {
            "num_cpus": role.num_cpus,
            "num_gpus": role.num_gpus,
            "resources": role.resources or None,
            "max_concurrency": 1000,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        }

    def _release(self) -> None:
        """End the actors by removing their group, and the Ray that was started for them."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False


async def _verify(verifier: ActorHandle, request: VerifyRequest) -> VerifyReply:
    reply: VerifyReply = await verifier.verify.remote(request)
    return reply


def _node() -> str:
    return str(ray.util.get_node_ip_address())
