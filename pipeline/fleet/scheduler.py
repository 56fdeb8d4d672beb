"""The scheduler: deals shards to drafters as long as they have room, and hands on what is finished.

What fails is dealt again, a bounded number of times. A shard that fails every time is taken apart, so
that one example which no drafter survives costs one row, not the shard.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.fleet.errors import FleetLostError, one_line
from pipeline.fleet.interface import Drafter
from pipeline.records import Outcome, RowError, Shard, ShardResult

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lease:
    """A finished shard. `attempts` is how often the slowest of its examples was begun."""

    shard: Shard
    result: ShardResult
    attempts: int = 1


@dataclass
class _Whole:
    """A shard that was taken apart, and what is known of it so far."""

    shard: Shard
    missing: int
    outcomes: list[Outcome] = field(default_factory=list)
    errors: dict[str, RowError] = field(default_factory=dict)


@dataclass(frozen=True)
class _Work:
    """A shard, or one example of a shard that was taken apart, to be decoded."""

    shard: Shard
    attempt: int = 1
    whole: _Whole | None = None


class Scheduler:
    """Leases shards until all are decoded.

    Args:
        attempts: how often a shard is begun before it is taken apart.
    """

    def __init__(self, drafters: Sequence[Drafter], attempts: int = 3) -> None:
        self.retries = 0
        """Leases that failed and were dealt again."""
        self._attempts = attempts
        self._again: deque[_Work] = deque()
        self._parts: deque[_Work] = deque()
        self._idle = deque(drafters)
        """Drafters that have room for another shard."""
        self._taking: dict[asyncio.Task[Any], tuple[_Work, Drafter]] = {}
        self._running: dict[asyncio.Task[Any], tuple[_Work, Drafter]] = {}
        self._recovering: dict[asyncio.Task[None], Drafter] = {}
        self._last_error: Exception | None = None
        # Dealing goes on while the driver writes, unless it falls far behind.
        self._done: asyncio.Queue[Lease | Exception | None] = asyncio.Queue(2 * len(drafters))

    async def leases(self, shards: Iterator[Shard]) -> AsyncGenerator[Lease, None]:
        """Decode all shards, each once, and yield them as they finish, in any order.

        A drafter is dealt its next shard when it has room for one, so the quick ones get more.

        Raises:
            FleetLostError: every drafter is gone for good.
        """
        dealing = asyncio.create_task(self._deal_all(shards))
        try:
            while (lease := await self._done.get()) is not None:
                if isinstance(lease, Exception):
                    raise lease
                yield lease
        finally:
            for task in (dealing, *self._taking, *self._running, *self._recovering):
                task.cancel()

    async def _deal_all(self, shards: Iterator[Shard]) -> None:
        """Put all finished shards in the queue; behind them None, or what ended the dealing."""
        try:
            await self._deal_until_done(shards)
        except Exception as error:
            await self._done.put(error)
        else:
            await self._done.put(None)

    async def _deal_until_done(self, shards: Iterator[Shard]) -> None:
        self._deal(shards)
        while tasks := [*self._taking, *self._running, *self._recovering]:
            if not (self._taking or self._running) and self._nothing_left(shards):
                return  # nobody waits for a drafter that is still being started again
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                for lease in self._ended(task):
                    await self._done.put(lease)
            self._deal(shards)
        if not self._nothing_left(shards):
            assert self._last_error is not None
            raise FleetLostError(
                f"no drafter is left: {one_line(self._last_error)}. Finished shards are kept; run the "
                "same command again to resume"
            )

    def _nothing_left(self, shards: Iterator[Shard]) -> bool:
        """Whether nothing waits to be dealt; a shard that is found here is dealt next."""
        if not self._again and not self._parts and (shard := next(shards, None)) is not None:
            self._again.append(_Work(shard))
        return not self._again and not self._parts

    def _deal(self, shards: Iterator[Shard]) -> None:
        """Shards first; what was taken apart comes last, one example in the fleet and nothing beside it.

        An example may take a verifier with it, and whatever other drafters have there.
        """
        while self._idle:
            shard = None if self._again else next(shards, None)
            if self._again:
                self._lease(self._again.popleft(), self._idle.popleft())
            elif shard is not None:
                self._lease(_Work(shard), self._idle.popleft())
            else:
                break
        if self._parts and self._idle and not (self._taking or self._running):
            self._lease(self._parts.popleft(), self._idle.popleft())

    def _lease(self, work: _Work, drafter: Drafter) -> None:
        self._taking[asyncio.ensure_future(drafter.take(work.shard))] = work, drafter

    def _ended(self, task: asyncio.Task[Any]) -> list[Lease]:
        """What a task that ended leads to: finished shards, or more work."""
        if task in self._recovering:
            self._recovered(self._recovering.pop(task), task.exception())
            return []
        of_kind = self._taking if task in self._taking else self._running
        if task not in of_kind:  # it failed with another lease of its drafter
            return []
        work, drafter = of_kind[task]
        error = task.exception()
        if isinstance(error, Exception):
            lost = self._abandon(drafter, error)
            return [lease for lease in (self._failed(work, error) for work in lost) if lease]
        del of_kind[task]
        result = task.result()  # raises what is no error, an interrupt
        if isinstance(result, ShardResult):
            lease = self._delivered(work, result)
            return [lease] if lease else []
        self._running[asyncio.ensure_future(drafter.outcomes(result))] = work, drafter
        self._idle.append(drafter)
        return []

    def _delivered(self, work: _Work, result: ShardResult) -> Lease | None:
        if work.whole is None:
            return Lease(work.shard, result, work.attempt)
        work.whole.outcomes.extend(result.outcomes)
        return self._part_done(work, result)

    def _failed(self, work: _Work, error: Exception) -> Lease | None:
        """Deal a lease again; behind the last attempt take the shard apart, or give an example up."""
        self.retries += 1
        reason = one_line(error)
        _LOG.warning("shard %d failed (attempt %d): %s", work.shard.index, work.attempt, reason)
        if work.attempt < self._attempts:
            self._again.append(replace(work, attempt=work.attempt + 1))
            return None
        if work.whole is None and len(work.shard.examples) > 1:
            whole = _Whole(work.shard, missing=len(work.shard.examples))
            for example in work.shard.examples:
                part = Shard(work.shard.index, (example,))
                self._parts.append(_Work(part, work.attempt + 1, whole))
            return None
        whole = work.whole or _Whole(work.shard, missing=1)
        for example in work.shard.examples:
            message = f"every one of {work.attempt} attempts failed: {reason}"
            whole.errors[example.example_id] = RowError("worker_failed", message)
        nothing = ShardResult(work.shard.index, (), "", "", "")
        return self._part_done(replace(work, whole=whole), nothing)

    def _part_done(self, work: _Work, result: ShardResult) -> Lease | None:
        """The shard again, once all of its examples are decoded or given up."""
        whole = work.whole
        assert whole is not None
        whole.missing -= 1
        if whole.missing:
            return None
        examples = tuple(
            replace(example, error=whole.errors.get(example.example_id, example.error))
            for example in whole.shard.examples
        )
        result = replace(result, outcomes=tuple(whole.outcomes))
        return Lease(replace(whole.shard, examples=examples), result, work.attempt)

    # --- drafters that failed -----------------------------------------------------------------------

    def _abandon(self, drafter: Drafter, error: Exception) -> list[_Work]:
        """All leases of a drafter fail together; it is made ready once. What it worked on comes back."""
        self._last_error = error
        lost = []
        for of_kind in (self._taking, self._running):
            for task in [task for task, (_, owner) in of_kind.items() if owner is drafter]:
                task.cancel()
                lost.append(of_kind.pop(task)[0])
        if drafter in self._idle:
            self._idle.remove(drafter)
        self._recovering[asyncio.ensure_future(drafter.recover())] = drafter
        return lost

    def _recovered(self, drafter: Drafter, error: BaseException | None) -> None:
        if error is None:
            self._idle.append(drafter)
        else:
            self._last_error = error if isinstance(error, Exception) else self._last_error
            _LOG.error("%s is lost: %s", drafter.name, one_line(error))
