"""The draft/verify pipeline of one drafter: several banks in flight, so that both models work.

One coroutine drives each bank: draft a block, wait for its verification, apply it. While one bank
waits for the verifier, another drafts. Nothing here knows Ray: verification is an awaitable, and
model work goes through `compute`, which may run it in another thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from pipeline.records import Outcome, Shard, ShardResult, WorkerStats
from pipeline.workers.drafter import Bank, DrafterWorker
from pipeline.workers.lanes import Finished
from pipeline.workers.verifier import StaleBankError, VerifierWorker
from pipeline.workers.wire import VerifyReply, VerifyRequest

Result = TypeVar("Result")


class Compute(Protocol):
    """Runs model work, one piece at a time; in this thread or in another."""

    async def __call__(self, work: Callable[[], Result]) -> Result:
        """The result of the work."""


@dataclass(frozen=True)
class VerifierLink:
    """A verifier as a drafter sees it: its name, and how to have a block judged there."""

    name: str
    verify: Callable[[VerifyRequest], Awaitable[VerifyReply]]


class VerifierEngine:
    """A verifier that answers many drafters, one block at a time.

    Args:
        compute: runs model work; it must run one piece at a time.
        node: where the verifier is.
    """

    def __init__(self, name: str, worker: VerifierWorker, compute: Compute, node: str = "") -> None:
        self.stats = WorkerStats(name, node)
        self._worker = worker
        self._compute = compute

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        """Judge a block. Raises `StaleBankError` as the worker does."""
        return await self._compute(lambda: self._timed(request))

    async def step_seconds(self) -> float:
        """Seconds of the verification of one block at batch 1."""
        return await self._compute(self._worker.step_seconds)

    def _timed(self, request: VerifyRequest) -> VerifyReply:
        started = time.perf_counter()
        reply = self._worker.verify(request)
        self.stats = replace(
            self.stats,
            rounds=self.stats.rounds + 1,
            lane_rounds=self.stats.lane_rounds + request.num_lanes,
            busy_seconds=self.stats.busy_seconds + time.perf_counter() - started,
        )
        return reply


@dataclass
class _Ticket:
    """A shard in the making: the outcomes so far, and who waits for all of them."""

    expected: int
    done: asyncio.Future[None]
    outcomes: list[Outcome] = field(default_factory=list)


class DrafterEngine:
    """Decodes shards with one drafter and the verifiers it is linked to.

    Args:
        verifiers: bank b of the drafter uses link `b mod len(verifiers)`.
        compute: runs model work; it must run one piece at a time.
        node: where the drafter is, for the rows.
    """

    def __init__(
        self,
        worker: DrafterWorker,
        verifiers: Sequence[VerifierLink],
        compute: Compute,
        node: str = "",
    ) -> None:
        self.stats = WorkerStats(worker.name, node)
        self._worker = worker
        self._links = {
            bank.name: verifiers[index % len(verifiers)] for index, bank in enumerate(worker.banks)
        }
        self._compute = compute
        self._tickets: dict[int, _Ticket] = {}
        self._changed = asyncio.Condition()
        self._drivers: list[asyncio.Task[None]] = []
        self._error: Exception | None = None
        """What ended the pipeline; nothing is decoded any more."""

    async def decode(self, shard: Shard) -> ShardResult:
        """All outcomes of a shard. Several shards may be under way, so that slots stay full.

        Raises:
            Whatever ended the pipeline: an error of a model or of the link to a verifier.
        """
        if self._error is not None:
            raise self._error
        self._start()
        ticket = _Ticket(self._worker.add(shard), asyncio.get_running_loop().create_future())
        self._tickets[shard.index] = ticket
        if ticket.expected:
            await self._notify()
            await ticket.done
        del self._tickets[shard.index]
        verifiers = sorted({link.name for link in self._links.values()})
        return ShardResult(
            shard=shard.index,
            outcomes=tuple(ticket.outcomes),
            drafter=self.stats.name,
            verifier=",".join(verifiers),
            node=self.stats.node,
        )

    async def step_seconds(self) -> float:
        """Seconds of one drafted token at batch 1."""
        return await self._compute(self._worker.step_seconds)

    async def close(self) -> None:
        """Stop the banks. Shards under way are abandoned."""
        for driver in self._drivers:
            driver.cancel()
        await asyncio.gather(*self._drivers, return_exceptions=True)

    def _start(self) -> None:
        if not self._drivers:
            self._drivers = [asyncio.create_task(self._drive(bank)) for bank in self._worker.banks]

    async def _drive(self, bank: Bank) -> None:
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._worker.seat(bank))
                self._deliver(await self._round(bank))
                await self._notify()
        except Exception as error:  # the shards' owners are told; see `decode`
            self._fail(error)

    async def _round(self, bank: Bank) -> list[Finished]:
        """Draft, have it verified, apply."""
        request = await self._compute(lambda: self._draft(bank))
        reply = await self._verify(bank, request)
        started = time.perf_counter()
        finished = self._worker.apply(bank, reply)
        self.stats = replace(
            self.stats,
            rounds=self.stats.rounds + 1,
            lane_rounds=self.stats.lane_rounds + request.num_lanes,
            outcomes=self.stats.outcomes + len(finished),
            busy_seconds=self.stats.busy_seconds + time.perf_counter() - started,
            bytes_sent=self.stats.bytes_sent + request.nbytes,
        )
        return finished

    def _draft(self, bank: Bank) -> VerifyRequest:
        started = time.perf_counter()
        request = self._worker.draft(bank)
        busy = self.stats.busy_seconds + time.perf_counter() - started
        self.stats = replace(self.stats, busy_seconds=busy)
        return request

    async def _verify(self, bank: Bank, request: VerifyRequest) -> VerifyReply:
        verify = self._links[bank.name].verify
        try:
            return await verify(request)
        except StaleBankError:
            return await verify(self._worker.reopened(bank, request))

    def _deliver(self, finished: Iterable[Finished]) -> None:
        for item in finished:
            ticket = self._tickets[item.shard]
            ticket.outcomes.append(item.outcome)
            if len(ticket.outcomes) == ticket.expected:
                ticket.done.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = error
        for ticket in self._tickets.values():
            if not ticket.done.done():
                ticket.done.set_exception(error)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
