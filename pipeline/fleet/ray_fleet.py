"""The fleet on Ray: it connects, places actors, hands them to the scheduler and gives all back."""

from __future__ import annotations

import asyncio
import pickle
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline.config import DrafterRole, VerifierRole
from pipeline.fleet.actors import DrafterActor, VerifierActor
from pipeline.fleet.calls import keep_alive, when_available
from pipeline.fleet.connection import connected
from pipeline.fleet.errors import FleetLostError, StartError, one_line
from pipeline.fleet.interface import FleetPlan
from pipeline.fleet.placement import bundles_of, nodes_free, placed, reserve, settled
from pipeline.records import Shard, ShardResult, Span, StepTimes, WorkerStats


class RemoteDrafter:
    """A drafter's actor as the scheduler sees it."""

    def __init__(self, name: str, actor: ActorHandle, start_seconds: float) -> None:
        self.name = name
        self.actor = actor
        self._start_seconds = start_seconds

    async def take(self, shard: Shard) -> int:
        """Queue a shard; its ticket comes back when there is room for another."""
        ticket: int = await self.actor.take.remote(shard)
        return ticket

    async def outcomes(self, ticket: int) -> ShardResult:
        """All outcomes of a shard that was taken."""
        result: ShardResult = pickle.loads(await self.actor.outcomes.remote(ticket))
        return result

    async def recover(self) -> None:
        """Wait until Ray has started it again, if it died, and let it begin afresh."""
        await when_available(self.actor.recover.remote, self._start_seconds)


class RayFleet:
    """Actors in a placement group. Starts a Ray of its own if no cluster is named.

    Args:
        address: a Ray cluster, as `ray.init` takes it; None is `RAY_ADDRESS`, else its own Ray.
    """

    def __init__(self, plan: FleetPlan, address: str | None = None) -> None:
        self._plan = plan
        self._address = address
        self._run = uuid.uuid4().hex
        self._ray = ExitStack()
        self._group: PlacementGroup | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._verifiers: list[ActorHandle] = []
        self._drafters: list[RemoteDrafter] = []
        self._lives: dict[str, dict[tuple[str, int], WorkerStats]] = {}
        """The last accounts of each process that a worker had, by node and process id."""

    async def __aenter__(self) -> RayFleet:
        """Connect, place, and load all models at once.

        Raises:
            PlacementError: the workers do not fit the cluster.
            StartError: a model cannot be loaded, or not in time.
        """
        try:
            with _own_sigterm():
                await _to_its_end(self._connect)
            await _to_its_end(self._reserve)
            assert self._group is not None
            await placed(self._group, self._plan.cluster)
            self._create()
            await self._wait_until_ready()
            limits = self._plan.cluster.failure
            self._watches = [
                asyncio.create_task(keep_alive(name, actor, limits))
                for name, actor in self._actors().items()
            ]
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
        """What each worker did so far, in all its lives.

        Of a process that died it is what was known when this was last asked.
        """
        calls = (actor.stats.remote() for actor in self._actors().values())
        for stats in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(stats, WorkerStats):
                self._lives.setdefault(stats.name, {})[stats.node, stats.pid] = stats
        return [
            _sum_of_lives(list(self._lives[name].values()))
            for name in self._actors()
            if name in self._lives
        ]

    @property
    def restarts(self) -> int:
        """How many more processes than workers `stats` has seen."""
        return sum(len(lives) - 1 for lives in self._lives.values())

    async def timeline(self) -> list[Span]:
        """All that the workers did, those that died not counted."""
        calls = (actor.spans.remote() for actor in self._actors().values())
        parts = await asyncio.gather(*calls, return_exceptions=True)
        return [span for part in parts if isinstance(part, list) for span in part]

    async def step_times(self) -> StepTimes:
        """Measured on the first of each role that is there, one after the other."""
        drafting = await self._step_seconds([drafter.actor for drafter in self._drafters])
        return StepTimes(drafting, await self._step_seconds(self._verifiers))

    def _actors(self) -> dict[str, ActorHandle]:
        drafters = {drafter.name: drafter.actor for drafter in self._drafters}
        return drafters | dict(zip(self._plan.verifier_names(), self._verifiers, strict=False))

    async def _step_seconds(self, actors: Sequence[ActorHandle]) -> float:
        limit = self._plan.cluster.failure.start_seconds
        for actor in actors:
            with suppress(RayActorError, TimeoutError):
                return await when_available(actor.step_seconds.remote, limit)
        raise FleetLostError(
            "all drafters or all verifiers were gone before they had begun; run the same command again"
        )

    def _connect(self) -> None:
        self._ray.enter_context(connected(self._address))

    def _reserve(self) -> None:
        cluster = settled(self._plan.cluster, nodes_free())
        self._plan = replace(self._plan, cluster=cluster)
        self._group = reserve(cluster)

    async def _wait_until_ready(self) -> None:
        seconds = self._plan.cluster.failure.start_seconds
        starts = {
            asyncio.ensure_future(when_available(actor.ready.remote, seconds)): name
            for name, actor in self._actors().items()
        }
        try:
            done, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for start in starts:
                start.cancel()
        for start in done:
            if (error := start.exception()) is not None:
                raise StartError(self._not_started(starts[start], error)) from error

    def _not_started(self, name: str, error: BaseException) -> str:
        role = name.split("-")[0]
        models = self._plan.models
        path = {"drafter": models.drafter, "verifier": models.verifier}[role].path
        if isinstance(error, TimeoutError):
            seconds = self._plan.cluster.failure.start_seconds
            return (
                f"models.{role}.path: {name} did not have {path} loaded within {seconds:g} s; "
                "raise failure.start_seconds in the cluster config"
            )
        return f"models.{role}.path: {name} cannot load {path}: {one_line(error)}"

    def _create(self) -> None:
        places = {
            bundle.actor: index for index, bundle in enumerate(bundles_of(self._plan.cluster))
        }
        plan = self._plan
        for name in plan.verifier_names():
            options = self._options(places[name], plan.cluster.verifier)
            known = self._known(name)
            actor = ray.remote(VerifierActor).options(name=known, **options).remote(name, plan)
            self._verifiers.append(actor)
        for index, name in enumerate(plan.drafter_names()):
            links = [(other, self._known(other)) for other in plan.verifier_names()]
            own = [links[number] for number in plan.verifiers_of(index)]
            spares = [link for link in links if link not in own]
            options = self._options(places[name], plan.cluster.drafter)
            actor = ray.remote(DrafterActor).options(**options).remote(name, plan, own, spares)
            limit = plan.cluster.failure.start_seconds
            self._drafters.append(RemoteDrafter(name, actor, limit))

    def _known(self, name: str) -> str:
        """An actor's name in the cluster, where other runs may have actors of the same name."""
        return f"speccascade/{self._run}/{name}"

    def _options(self, bundle: int, role: DrafterRole | VerifierRole) -> dict[str, Any]:
        return {
            "num_cpus": role.num_cpus,
            "num_gpus": role.num_gpus,
            "resources": role.resources or None,
            "max_concurrency": 1000,
            "max_restarts": self._plan.cluster.failure.restarts,
            # A restarted worker has forgotten its lanes; who called it knows what to do.
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        }

    def _release(self) -> None:
        """End the actors by removing their group, and the Ray that was started for them."""
        for watch in self._watches:
            watch.cancel()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        self._ray.close()


async def _to_its_end(work: Callable[[], None]) -> None:
    """Work in a thread. Whoever is cancelled meanwhile waits, so that what was begun can be undone."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.gather(working, return_exceptions=True)
        raise


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's answer to SIGTERM.

    Ray puts one in its place that aborts the process three seconds later, ended or not.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
            signal.alarm(0)


def _sum_of_lives(lives: Sequence[WorkerStats]) -> WorkerStats:
    """The accounts of a worker that was started several times; where it is, is where it is now."""
    accounts = [asdict(life) for life in lives]
    amounts = accounts[-1].keys() - {"name", "node", "pid"}
    return replace(lives[-1], **{name: sum(one[name] for one in accounts) for name in amounts})
