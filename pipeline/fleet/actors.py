"""The fleet on Ray: each worker is an actor in its own process with its own resources.

A drafter's actor calls its verifiers' actors directly; the driver deals in shards only. Both kinds
are async actors whose model work runs in one thread of their own: while a verifier computes it
already holds the next block, which is what hides the round trip.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    RayActorError,
)
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential_jitter

from pipeline.config import DrafterRole, FailureConfig, VerifierRole
from pipeline.fleet.connection import connected
from pipeline.fleet.errors import FleetLostError, StartError, one_line
from pipeline.fleet.interface import FleetPlan
from pipeline.fleet.placement import bundles_of, nodes_free, placed, reserve, settled
from pipeline.models.determinism import prepare_numerics
from pipeline.models.memory import keep_freed_memory
from pipeline.records import Shard, ShardResult, Span, StepTimes, WorkerStats
from pipeline.workers.engine import (
    NoVerifierError,
    VerifierGoneError,
    VerifierLink,
    VerifierLostError,
)
from pipeline.workers.wire import VerifyReply, VerifyRequest

Result = TypeVar("Result")

_LOG = logging.getLogger(__name__)


class _ModelThread:
    """One thread for all model work of an actor, so that its event loop always answers."""

    def __init__(self, num_cpus: float) -> None:
        # Thread counts belong to the thread that computes.
        threads = max(1, int(num_cpus))
        self._executor = ThreadPoolExecutor(1, initializer=prepare_numerics, initargs=(threads,))
        self._began: float | None = None

    async def __call__(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._timed, work)

    @property
    def seconds_at_work(self) -> float:
        """How long it has been at the present piece of work."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def _timed(self, work: Callable[[], Result]) -> Result:
        self._began = time.monotonic()
        try:
            return work()
        finally:
            self._began = None


class VerifierActor:
    """A verifier in its own process."""

    def __init__(self, name: str, plan: FleetPlan) -> None:
        prepare_numerics()
        keep_freed_memory()
        self._thread = _ModelThread(plan.cluster.verifier.num_cpus)
        self._engine = plan.verifier_engine(name, self._thread, _node())

    async def ready(self) -> int:
        """The process id, when the model is loaded."""
        return os.getpid()

    async def seconds_at_work(self) -> float:
        """How long its model has been at the present piece of work."""
        return self._thread.seconds_at_work

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
    """A drafter in its own process, linked to the verifiers it calls.

    Args:
        verifiers: names, and what the cluster knows them by, of the verifiers of its banks.
        spares: the others.
    """

    def __init__(
        self,
        name: str,
        plan: FleetPlan,
        verifiers: Sequence[tuple[str, str]],
        spares: Sequence[tuple[str, str]],
    ) -> None:
        prepare_numerics()
        keep_freed_memory()
        limits = plan.cluster.failure
        # Handles among the arguments would have to outlive the driver's for a restart; names need not.
        self._verifiers = {other: _found(known) for other, known in (*verifiers, *spares)}
        links = {
            other: VerifierLink(other, partial(_verify, handle, limits))
            for other, handle in self._verifiers.items()
        }
        self._thread = _ModelThread(plan.cluster.drafter.num_cpus)
        self._engine = plan.drafter_engine(
            name,
            [links[other] for other, _ in verifiers],
            self._thread,
            _node(),
            [links[other] for other, _ in spares],
        )

    async def ready(self) -> int:
        """The process id, when the model is loaded."""
        return os.getpid()

    async def seconds_at_work(self) -> float:
        """How long its model has been at the present piece of work."""
        return self._thread.seconds_at_work

    async def take(self, shard: Shard) -> int:
        """Queue a shard; its ticket comes back when there is room for another."""
        return await self._engine.take(shard)

    async def outcomes(self, ticket: int) -> bytes:
        """All outcomes of a shard that was taken, pickled.

        Ray's own pickler asks Python about each object, which takes eight times as long, and the
        model waits for the interpreter meanwhile.
        """
        return pickle.dumps(await self._engine.outcomes(ticket), protocol=5)

    async def recover(self) -> None:
        """Forget what was under way, and wait until a verifier is there.

        Raises:
            ActorUnavailableError: they are being started again.
            NoVerifierError: they are all gone for good.
        """
        await self._engine.recover()
        calls = [verifier.ready.remote() for verifier in self._verifiers.values() if verifier]
        unavailable = None
        for call in asyncio.as_completed(calls):
            try:
                await call
            except ActorUnavailableError as error:
                unavailable = error
            except RayActorError:
                continue
            else:
                return
        if unavailable is not None:
            raise unavailable
        raise NoVerifierError("no verifier is left")

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
        await _when_available(self.actor.recover.remote, self._start_seconds)


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
            await _to_its_end(self._connect)
            await _to_its_end(self._reserve)
            assert self._group is not None
            await placed(self._group, self._plan.cluster)
            self._create()
            await self._wait_until_ready()
            limits = self._plan.cluster.failure
            self._watches = [
                asyncio.create_task(_watch(name, actor, limits))
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
                return await _when_available(actor.step_seconds.remote, limit)
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
            asyncio.ensure_future(_when_available(actor.ready.remote, seconds)): name
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


async def _verify(
    verifier: ActorHandle | None, limits: FailureConfig, request: VerifyRequest
) -> VerifyReply:
    """Have a block judged; a verifier that takes too long is started again.

    Raises:
        VerifierLostError: it died, or it hung, and is there again.
        VerifierGoneError: it is gone for good.
    """
    if verifier is None:
        raise VerifierGoneError("it was gone when the drafter was started")
    try:
        call = verifier.verify.remote(request)
        reply: VerifyReply = await asyncio.wait_for(call, limits.block_seconds)
        return reply
    except TimeoutError:
        reason = f"a block was not judged within {limits.block_seconds:g} s"
        await asyncio.to_thread(ray.kill, verifier, no_restart=False)
    except (ActorUnavailableError, ObjectLostError) as error:
        reason = one_line(error)
    except ActorDiedError as error:
        raise VerifierGoneError(one_line(error)) from error
    try:
        await _when_available(verifier.ready.remote, limits.start_seconds)
    except (ActorDiedError, TimeoutError) as error:
        raise VerifierGoneError(f"{reason}, and it did not come back") from error
    raise VerifierLostError(reason)


async def _when_available(call: Callable[[], Awaitable[Result]], seconds: float) -> Result:
    """Call an actor that may just be starting again.

    Raises:
        TimeoutError: time is up.
        ActorDiedError: it will not come back.
    """
    tries = AsyncRetrying(
        retry=retry_if_exception_type(ActorUnavailableError),
        wait=wait_exponential_jitter(multiplier=0.2, max=5),
    )
    async with asyncio.timeout(seconds):
        async for attempt in tries:
            with attempt:
                return await call()
    raise AssertionError("the last attempt returns or raises")


async def _watch(name: str, actor: ActorHandle, limits: FailureConfig) -> None:
    """Start a worker again that hangs, which Ray does not see; give up one that does not come back."""
    while True:
        await asyncio.sleep(limits.silence_seconds / 4)
        try:
            if await _hangs(name, actor, limits):
                await asyncio.to_thread(ray.kill, actor, no_restart=False)
            await _when_available(actor.ready.remote, limits.start_seconds)
        except TimeoutError:
            _LOG.error("%s was not back within %g s and is given up", name, limits.start_seconds)
            await asyncio.to_thread(ray.kill, actor)
            return
        except RayActorError:
            return  # gone for good; whoever calls it hears so


async def _hangs(name: str, actor: ActorHandle, limits: FailureConfig) -> bool:
    """Whether a worker's process does not answer, or its model does not end. Raises `ActorDiedError`."""
    try:
        call = actor.seconds_at_work.remote()
        seconds = await asyncio.wait_for(call, limits.silence_seconds)
    except TimeoutError:
        _LOG.warning("%s was silent for %g s; starting it again", name, limits.silence_seconds)
        return True
    except ActorUnavailableError:
        return False
    if seconds > limits.block_seconds:
        _LOG.warning("%s was at one block for %g s; starting it again", name, seconds)
        return True
    return False


async def _to_its_end(work: Callable[[], None]) -> None:
    """Work in a thread. Whoever is cancelled meanwhile waits, so that what was begun can be undone."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.gather(working, return_exceptions=True)
        raise


def _found(known: str) -> ActorHandle | None:
    """An actor by the name that the cluster knows it by; None if it is gone for good."""
    try:
        return ray.get_actor(known)
    except ValueError:
        return None


def _sum_of_lives(lives: Sequence[WorkerStats]) -> WorkerStats:
    """The accounts of a worker that was started several times; where it is, is where it is now."""
    accounts = [asdict(life) for life in lives]
    amounts = accounts[-1].keys() - {"name", "node", "pid"}
    return replace(lives[-1], **{name: sum(one[name] for one in accounts) for name in amounts})


def _node() -> str:
    return str(ray.util.get_node_ip_address())
