"""The draft/verify pipeline of one drafter: several banks in flight, so that both models work.

One coroutine drives each bank: apply the last verdicts, draft a block, wait for its verification.
While one bank waits for the verifier, another drafts. Nothing here knows Ray: verification is an
awaitable, and model work goes through `compute`, which may run it in another thread.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from pipeline.records import Outcome, Shard, ShardResult
from pipeline.workers.drafter import Bank, DrafterWorker
from pipeline.workers.lanes import Finished
from pipeline.workers.ledger import Ledger
from pipeline.workers.verifier import StaleBankError, VerifierWorker
from pipeline.workers.wire import VerifyReply, VerifyRequest

Result = TypeVar("Result")

BLOCK_LOSSES = 2
"""How often a verifier may be lost over a block until the block is taken to be the cause."""


class Compute(Protocol):
    """Runs model work, one piece at a time; in this thread or in another."""

    async def __call__(self, work: Callable[[], Result]) -> Result:
        """The result of the work."""


class VerifierLostError(ConnectionError):
    """A verifier died or hung over a block, and is there again. Another try may help."""


class VerifierGoneError(ConnectionError):
    """A verifier will not come back. Another one may do its work."""


class NoVerifierError(RuntimeError):
    """All verifiers of a drafter are gone."""


@dataclass(frozen=True)
class VerifierLink:
    """A verifier as a drafter sees it: its name, and how to have a block judged there.

    `verify` raises `StaleBankError` as the worker does, `VerifierLostError` and `VerifierGoneError`.
    """

    name: str
    verify: Callable[[VerifyRequest], Awaitable[VerifyReply]]


class VerifierEngine:
    """A verifier that answers many drafters, one block at a time.

    Args:
        compute: runs model work; it must run one piece at a time.
    """

    def __init__(self, worker: VerifierWorker, compute: Compute, ledger: Ledger) -> None:
        self.ledger = ledger
        self._worker = worker
        self._compute = compute

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        """Judge a block. Raises `StaleBankError` as the worker does."""
        arrived = time.perf_counter()
        return await self._compute(lambda: self._timed(request, arrived))

    async def step_seconds(self) -> float:
        """Seconds of the verification of one block at batch 1."""
        return await self._compute(self._worker.step_seconds)

    def _timed(self, request: VerifyRequest, arrived: float) -> VerifyReply:
        started = time.perf_counter()
        with self.ledger.busy("verify", request.bank):
            reply = self._worker.verify(request)
        queued, busy = started - arrived, time.perf_counter() - started
        self.ledger.count(
            rounds=1,
            lane_rounds=request.num_lanes,
            pair_rounds=len(request.pair_rows),
            queue_seconds=queued,
        )
        return replace(reply, queue_seconds=queued, busy_seconds=busy)


@dataclass
class _Ticket:
    """A shard in the making: the outcomes so far, and who waits for all of them."""

    shard: Shard
    expected: int
    done: asyncio.Future[None]
    outcomes: list[Outcome] = field(default_factory=list)


@dataclass(frozen=True)
class _Turn:
    """What a bank's turn in the model thread gave: the ends of a round, and the next block."""

    finished: Sequence[Finished]
    drafted: VerifyRequest | VerifyReply | None
    """None where the bank has nothing to decode."""


class DrafterEngine:
    """Decodes shards with one drafter and the verifiers it is linked to.

    Args:
        verifiers: bank b of the drafter uses link `b mod len(verifiers)`.
        compute: runs model work; it must run one piece at a time.
        spares: verifiers that take over the banks of one that is gone.
    """

    def __init__(
        self,
        worker: DrafterWorker,
        verifiers: Sequence[VerifierLink],
        compute: Compute,
        ledger: Ledger,
        spares: Sequence[VerifierLink] = (),
    ) -> None:
        self.ledger = ledger
        self._worker = worker
        self._links = [verifiers[bank % len(verifiers)] for bank in range(len(worker.banks))]
        self._left = {link.name: link for link in (*verifiers, *spares)}
        self._compute = compute
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Condition()
        self._drivers: list[asyncio.Task[None]] = []
        self._error: Exception | None = None
        """What ended the pipeline; nothing is decoded any more."""

    async def take(self, shard: Shard) -> int:
        """Queue a shard. Returns its ticket as soon as there is room for another.

        There is room while fewer examples wait than there are slots, so that slots stay full however
        long the last texts of a shard take.

        Raises:
            Whatever ended the pipeline: an error of a model or of the link to a verifier.
        """
        if self._error is not None:
            raise self._error
        self._start()
        number = next(self._numbers)
        done = asyncio.get_running_loop().create_future()
        self._tickets[number] = _Ticket(shard, self._worker.add(shard, number), done)
        if not self._tickets[number].expected:
            done.set_result(None)
        async with self._changed:
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._worker.has_room() or self._error is not None)
        if self._error is not None:
            raise self._error
        return number

    async def outcomes(self, number: int) -> ShardResult:
        """All outcomes of a shard that was taken. Raises as `take` does."""
        ticket = self._tickets[number]
        try:
            await ticket.done
        finally:
            self._tickets.pop(number, None)
        verifiers = sorted({link.name for link in self._links})
        return ShardResult(
            shard=ticket.shard.index,
            outcomes=tuple(ticket.outcomes),
            drafter=self.ledger.name,
            verifier=",".join(verifiers),
            node=self.ledger.stats.node,
        )

    async def step_seconds(self) -> float:
        """Seconds of one drafted token at batch 1."""
        return await self._compute(self._worker.step_seconds)

    async def close(self) -> None:
        """Stop the banks. Shards under way are abandoned."""
        for driver in self._drivers:
            driver.cancel()
        await asyncio.gather(*self._drivers, return_exceptions=True)
        self._drivers = []

    async def recover(self) -> None:
        """Begin afresh after an error: all lanes are forgotten, their shards will be dealt again."""
        await self.close()
        self._fail(RuntimeError("the drafter began afresh"))
        await self._notify()
        await self._compute(self._worker.clear)
        self._tickets.clear()
        self._error = None

    def _start(self) -> None:
        if not self._drivers:
            self._drivers = [asyncio.create_task(self._drive(bank)) for bank in self._worker.banks]

    async def _drive(self, bank: Bank) -> None:
        """Turn after turn: apply the last verdicts, draft the next block, have it verified."""
        reply: VerifyReply | None = None
        try:
            while True:
                turn = await self._compute(partial(self._turn, bank, reply))
                self._deliver(turn.finished)
                await self._notify()
                reply = await self._verdicts(bank, turn.drafted)
        except Exception as error:  # the shards' owners are told; see `outcomes`
            self._fail(error)
            await self._notify()

    def _turn(self, bank: Bank, reply: VerifyReply | None) -> _Turn:
        """All of the worker's state is changed here, in the thread of its model."""
        finished: Sequence[Finished] = ()
        if reply is not None:
            with self.ledger.busy("apply", bank.name):
                finished = self._worker.apply(bank, reply)
            self.ledger.count(outcomes=len(finished))
        if not self._worker.has_work(bank):
            return _Turn(finished, None)
        with self.ledger.busy("draft", bank.name):
            self._worker.seat(bank)
            drafted = self._worker.draft(bank)
        self.ledger.count(
            rounds=1, lane_rounds=len(bank.seats.held), pair_rounds=len(bank.seats.pair_slots)
        )
        return _Turn(finished, drafted)

    async def _verdicts(
        self, bank: Bank, drafted: VerifyRequest | VerifyReply | None
    ) -> VerifyReply | None:
        """The verdicts on a block; where nothing was drafted, None as soon as there is work."""
        if drafted is None:
            async with self._changed:
                await self._changed.wait_for(lambda: self._worker.has_work(bank))
            return None
        return await self._verify(bank, drafted) if isinstance(drafted, VerifyRequest) else drafted

    async def _verify(self, bank: Bank, request: VerifyRequest) -> VerifyReply:
        number, losses = self._worker.banks.index(bank), 0
        reply: VerifyReply | None = None
        while reply is None:
            link, sent = self._links[number], time.perf_counter()
            try:
                reply = await link.verify(request)
            except StaleBankError:
                request = await self._compute(partial(self._worker.reopened, bank, request))
            except VerifierGoneError as error:
                self.ledger.count(retries=1)
                self._do_without(link.name, error)
            except VerifierLostError:
                self.ledger.count(retries=1)
                losses += 1
                if losses == BLOCK_LOSSES:
                    raise
        back = time.perf_counter()
        self.ledger.span("in flight", bank.name, sent, back)
        there = reply.queue_seconds + reply.busy_seconds
        self.ledger.count(transfer_seconds=back - sent - there, bytes_sent=request.nbytes)
        return reply

    def _do_without(self, name: str, reason: VerifierGoneError) -> None:
        """Deal the banks of a verifier that is gone to those that are left."""
        self._left.pop(name, None)
        left = list(self._left.values())
        if not left:
            raise NoVerifierError(f"no verifier is left: {reason}") from reason
        self._links = [
            left[bank % len(left)] if link.name == name else link
            for bank, link in enumerate(self._links)
        ]

    def _deliver(self, finished: Iterable[Finished]) -> None:
        for item in finished:
            ticket = self._tickets[item.ticket]
            ticket.outcomes.append(item.outcome)
            if len(ticket.outcomes) == ticket.expected:
                ticket.done.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = error
        for ticket in self._tickets.values():
            if not ticket.done.done():
                ticket.done.set_exception(error)
                ticket.done.exception()  # who asks hears of it; who was cancelled need not

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
