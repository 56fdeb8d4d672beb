"""The scheduler: deals shards to drafters, a few ahead of need, and hands on what is finished."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from pipeline.fleet.interface import Drafter
from pipeline.records import Shard, ShardResult

SHARDS_AHEAD = 2
"""Leases a drafter holds: it starts on the next shard while lanes of the last one still run."""


@dataclass(frozen=True)
class Lease:
    """A shard that a drafter has finished."""

    shard: Shard
    result: ShardResult


async def lease_shards(
    shards: Iterator[Shard], drafters: Sequence[Drafter], ahead: int = SHARDS_AHEAD
) -> AsyncIterator[Lease]:
    """Decode all shards, each once, and yield them as they finish, in any order.

    A drafter is dealt its next shard when it has finished one, so the quick ones get more.

    Raises:
        Whatever a drafter raised; leases under way are then abandoned.
    """
    running: dict[asyncio.Task[ShardResult], tuple[Shard, Drafter]] = {}
    # All drafters get their first lease before any gets its second.
    idle = [drafter for _ in range(ahead) for drafter in drafters]
    try:
        while True:
            while idle and (shard := next(shards, None)) is not None:
                drafter = idle.pop(0)
                running[asyncio.ensure_future(drafter.decode(shard))] = shard, drafter
            if not running:
                return
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                shard, drafter = running.pop(task)
                idle.append(drafter)
                yield Lease(shard, task.result())
    finally:
        for task in running:
            task.cancel()
