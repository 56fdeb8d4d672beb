"""The actors: each worker in its own process with its own resources.

A drafter's actor calls its verifiers' actors directly. Both kinds are async actors whose model work
runs in one thread of their own: while a verifier computes it already holds the next block, which is
what hides the round trip.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    RayActorError,
)

from pipeline.config import FailureConfig
from pipeline.fleet.calls import when_available
from pipeline.fleet.errors import one_line
from pipeline.fleet.interface import FleetPlan
from pipeline.models.determinism import prepare_numerics
from pipeline.models.memory import keep_freed_memory
from pipeline.records import Shard, Span, WorkerStats
from pipeline.workers.engine import (
    DrafterEngine,
    NoVerifierError,
    VerifierEngine,
    VerifierGoneError,
    VerifierLink,
    VerifierLostError,
)
from pipeline.workers.wire import VerifyReply, VerifyRequest

Result = TypeVar("Result")


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


class WorkerActor:
    """A worker in its own process: what both kinds are asked.

    Args:
        num_cpus: how many threads its model computes with.
    """

    _engine: DrafterEngine | VerifierEngine

    def __init__(self, num_cpus: float) -> None:
        prepare_numerics()
        keep_freed_memory()
        self._thread = _ModelThread(num_cpus)

    async def ready(self) -> int:
        """The process id, when the model is loaded."""
        return os.getpid()

    async def seconds_at_work(self) -> float:
        """How long its model has been at the present piece of work."""
        return self._thread.seconds_at_work

    async def stats(self) -> WorkerStats:
        """What it did so far."""
        return self._engine.ledger.stats

    async def spans(self) -> list[Span]:
        """All that it did."""
        return self._engine.ledger.spans

    async def step_seconds(self) -> float:
        """Seconds of one of its passes at batch 1."""
        return await self._engine.step_seconds()


class VerifierActor(WorkerActor):
    """A verifier in its own process."""

    _engine: VerifierEngine

    def __init__(self, name: str, plan: FleetPlan) -> None:
        super().__init__(plan.cluster.verifier.num_cpus)
        self._engine = plan.verifier_engine(name, self._thread, _node())

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        """Judge a block."""
        return await self._engine.verify(request)


class DrafterActor(WorkerActor):
    """A drafter in its own process, linked to the verifiers it calls.

    Args:
        verifiers: names, and what the cluster knows them by, of the verifiers of its banks.
        spares: the others.
    """

    _engine: DrafterEngine

    def __init__(
        self,
        name: str,
        plan: FleetPlan,
        verifiers: Sequence[tuple[str, str]],
        spares: Sequence[tuple[str, str]],
    ) -> None:
        super().__init__(plan.cluster.drafter.num_cpus)
        limits = plan.cluster.failure
        # Handles among the arguments would have to outlive the driver's for a restart; names need not.
        self._verifiers = {other: _found(known) for other, known in (*verifiers, *spares)}
        links = {
            other: VerifierLink(other, partial(_verify, handle, limits))
            for other, handle in self._verifiers.items()
        }
        self._engine = plan.drafter_engine(
            name,
            [links[other] for other, _ in verifiers],
            self._thread,
            _node(),
            [links[other] for other, _ in spares],
        )

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
        await when_available(verifier.ready.remote, limits.start_seconds)
    except (ActorDiedError, TimeoutError) as error:
        raise VerifierGoneError(f"{reason}, and it did not come back") from error
    raise VerifierLostError(reason)


def _found(known: str) -> ActorHandle | None:
    """An actor by the name that the cluster knows it by; None if it is gone for good."""
    try:
        return ray.get_actor(known)
    except ValueError:
        return None


def _node() -> str:
    return str(ray.util.get_node_ip_address())
