"""The scheduler deals each shard once, deals again what failed, and gives up single examples only.

Planted faults these tests catch: a failed lease that is forgotten; one that is dealt without end; a
drafter that gets shards before it has recovered; a poison example that takes its neighbours along;
parts that run beside other work; a run that waits for ever when no drafter is left, or for one that
nobody needs any more; tracebacks in place of reasons.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from pipeline.fleet.errors import FleetLostError, one_line
from pipeline.fleet.scheduler import Lease, Scheduler
from pipeline.records import Counts, Example, Outcome, Shard, ShardResult, Strategy

Fault = Callable[[Shard, int], bool]
"""Whether a drafter fails at a shard, given how many leases it had before."""


class FakeDrafter:
    """Decodes at once, or fails with all that it has under way, as a worker that dies does."""

    def __init__(self, name: str, fault: Fault = lambda *_: False, lives: int = 1000) -> None:
        self.name = name
        self.leases = 0
        self.down = False
        self._shards: dict[int, Shard] = {}
        self._fault, self._lives = fault, lives
        self._failed = asyncio.Event()

    async def take(self, shard: Shard) -> int:
        assert not self.down, "a lease for a drafter that has not recovered"
        self.leases += 1
        self._shards[self.leases] = shard
        if self._fault(shard, self.leases):
            self.down = True
            self._failed.set()
            raise RuntimeError(f"{self.name} died")
        while len(self._shards) > 1 and not self._failed.is_set():  # room for one more
            await asyncio.sleep(0.001)
        return self.leases

    async def outcomes(self, ticket: int) -> ShardResult:
        failed = self._failed
        await asyncio.wait([asyncio.create_task(failed.wait())], timeout=0.005)
        if failed.is_set():
            raise RuntimeError(f"{self.name} died")
        shard = self._shards.pop(ticket)
        outcomes = tuple(
            Outcome(e.example_id, 0, Strategy("verifier"), (1,), "stop", Counts())
            for e in shard.examples
        )
        return ShardResult(shard.index, outcomes, self.name, "verifier-0", "here")

    async def recover(self) -> None:
        self._lives -= 1
        if self._lives < 0:
            raise RuntimeError(f"{self.name} is gone for good")
        await asyncio.sleep(0.005)
        self.down, self._failed = False, asyncio.Event()
        self._shards.clear()


def shards(count: int, examples: int = 4) -> Iterator[Shard]:
    for index in range(count):
        names = (f"{index}-{number}" for number in range(examples))
        yield Shard(index, tuple(Example(name, name, (), (1,)) for name in names))


def scheduled(count: int, *drafters: FakeDrafter) -> tuple[list[Lease], Scheduler]:
    async def leases() -> tuple[list[Lease], Scheduler]:
        scheduler = Scheduler(drafters, attempts=3)
        return [lease async for lease in scheduler.leases(shards(count))], scheduler

    return asyncio.run(asyncio.wait_for(leases(), 60))


def assert_complete(leases: list[Lease], count: int) -> None:
    assert sorted(lease.shard.index for lease in leases) == list(range(count))
    for lease in leases:
        wanted = [example.example_id for example in lease.shard.examples if example.error is None]
        assert sorted(outcome.example_id for outcome in lease.result.outcomes) == wanted
        assert len(lease.shard.examples) == 4


def test_each_shard_is_dealt_once_and_all_drafters_get_some() -> None:
    drafters = [FakeDrafter("a"), FakeDrafter("b")]
    leases, scheduler = scheduled(20, *drafters)
    assert_complete(leases, 20)
    assert scheduler.retries == 0
    assert sum(drafter.leases for drafter in drafters) == 20
    assert all(drafter.leases > 5 for drafter in drafters)


def test_what_a_drafter_had_when_it_failed_is_dealt_again() -> None:
    failing = FakeDrafter("a", lambda _, lease: lease in {3, 7})
    leases, scheduler = scheduled(20, failing, FakeDrafter("b"))
    assert_complete(leases, 20)
    assert scheduler.retries >= 2
    assert {lease.attempts for lease in leases} > {1}


def test_an_example_that_always_fails_costs_one_row_and_no_neighbour() -> None:
    def poison(shard: Shard, _: int) -> bool:
        return any(example.example_id == "5-2" for example in shard.examples)

    drafters = [FakeDrafter("a", poison), FakeDrafter("b", poison)]
    leases, _ = scheduled(12, *drafters)
    assert_complete(leases, 12)
    errors = {
        example.example_id: example.error
        for lease in leases
        for example in lease.shard.examples
        if example.error
    }
    assert list(errors) == ["5-2"]
    assert errors["5-2"].code == "worker_failed"
    assert "4 attempts" in errors["5-2"].message


def test_what_was_taken_apart_runs_alone_in_the_fleet() -> None:
    """It may take a verifier with it, and so whatever another drafter has there."""
    under_way: dict[tuple[str, int], int] = {}
    alone = []

    class Noting(FakeDrafter):
        async def take(self, shard: Shard) -> int:
            alone.append(len(shard.examples) > 1 or not under_way)
            under_way[self.name, self.leases + 1] = shard.index
            try:
                return await super().take(shard)
            except RuntimeError:
                self._ended()
                raise

        async def outcomes(self, ticket: int) -> ShardResult:
            try:
                result = await super().outcomes(ticket)
            except RuntimeError:
                self._ended()
                raise
            del under_way[self.name, ticket]
            return result

        def _ended(self) -> None:
            for key in [key for key in under_way if key[0] == self.name]:
                del under_way[key]

    def poison(shard: Shard, _: int) -> bool:
        return any(example.example_id == "5-2" for example in shard.examples)

    leases, _ = scheduled(12, Noting("a", poison), Noting("b", poison), Noting("c", poison))
    assert_complete(leases, 12)
    assert all(alone)


def test_a_drafter_that_is_gone_leaves_its_work_to_the_others() -> None:
    dying = FakeDrafter("a", lambda _, lease: lease == 2, lives=0)
    leases, _ = scheduled(10, dying, FakeDrafter("b"))
    assert_complete(leases, 10)
    assert dying.leases <= 2


def test_without_any_drafter_left_the_run_ends_with_a_reason() -> None:
    drafters = [FakeDrafter(name, lambda _, lease: lease == 2, lives=0) for name in "ab"]
    with pytest.raises(
        FleetLostError, match=r"no drafter is left: . is gone for good\. .*same command again"
    ):
        scheduled(10, *drafters)


def test_the_end_does_not_wait_for_a_drafter_that_is_being_started_again() -> None:
    class Slow(FakeDrafter):
        async def recover(self) -> None:
            await asyncio.sleep(1000)

    leases, _ = scheduled(10, Slow("a", lambda _, lease: lease == 2), FakeDrafter("b"))
    assert_complete(leases, 10)


def test_more_drafters_than_shards_and_no_shard_at_all() -> None:
    leases, _ = scheduled(2, *(FakeDrafter(name) for name in "abcde"))
    assert_complete(leases, 2)
    assert scheduled(0, FakeDrafter("a"))[0] == []


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("no space", "no space"),
        ("", "RuntimeError"),
        (
            "The actor died because of an error raised in its creation task, ray::A.__init__()\n"
            '  File "a.py", line 6, in __init__\n    raise ValueError(...)\n    ^^^^^\n'
            "ValueError: weights are corrupt\nsecond line",
            "ValueError: weights are corrupt second line",
        ),
        ("The actor died.\n\tpid: 6936\n\tip: 192.0.2.2\nIts worker died.", "Its worker died."),
        ("An error\n    in a corner", "in a corner"),
    ],
)
def test_an_error_of_ray_is_told_in_one_line(said: str, line: str) -> None:
    assert one_line(RuntimeError(said)) == line
