"""Fleets of other shapes than one to one, with sleeps for models: see `tests.simulated`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from pipeline.fleet.scheduler import Lease
from pipeline.records import Shard
from tests.simulated import Shape, SimulatedFleet, simulate

Texts = dict[tuple[str, float | None], tuple[int, ...]]
"""By example and strategy."""

SHAPE = Shape(slots=8, strategies=3, rounds=4.0, shard_size=40)
EXAMPLES = 240


def texts_of(leases: Iterable[Lease]) -> Texts:
    """All texts; each example must have come once under each strategy."""
    texts: Texts = {}
    for lease in leases:
        for outcome in lease.result.outcomes:
            key = outcome.example_id, outcome.strategy.alpha
            assert key not in texts, f"{key} came twice"
            texts[key] = outcome.output_ids
    return texts


async def run(fleet: SimulatedFleet, examples: int = EXAMPLES) -> list[Lease]:
    """Decode with a fleet that is to be looked at afterwards."""
    async with fleet:
        return [lease async for lease in fleet.leases(fleet.shape.shards(examples))]


@pytest.fixture(scope="module")
def one_to_one() -> Texts:
    return texts_of(simulate(run(SimulatedFleet(SHAPE))))


@pytest.mark.parametrize(
    ("drafters", "verifiers", "banks"), [(4, 1, 3), (1, 2, 4), (2, 1, 3), (8, 2, 3), (3, 2, 1)]
)
def test_every_shape_gives_each_text_once_and_the_same(
    one_to_one: Texts, drafters: int, verifiers: int, banks: int
) -> None:
    shape = replace(SHAPE, drafters=drafters, verifiers=verifiers, banks=banks)
    texts = texts_of(simulate(run(SimulatedFleet(shape))))
    assert len(texts) == EXAMPLES * SHAPE.strategies
    assert texts == one_to_one


@pytest.mark.parametrize(("drafters", "verifiers", "banks"), [(4, 1, 3), (1, 2, 4)])
def test_workers_of_a_role_do_equally_much(drafters: int, verifiers: int, banks: int) -> None:
    fleet = SimulatedFleet(
        replace(SHAPE, drafters=drafters, verifiers=verifiers, banks=banks, shard_size=20)
    )
    simulate(run(fleet, 2000))
    for role in ("drafter", "verifier"):
        rounds = [stats.rounds for stats in fleet.stats(role)]
        assert min(rounds) >= 0.8 * max(rounds), f"{role}: {rounds}"


def test_a_slow_verifier_does_not_hold_up_the_banks_of_another() -> None:
    shape = replace(SHAPE, verifiers=2, banks=4, slow={"verifier-1": 10.0}, shard_size=40)
    fleet = SimulatedFleet(shape)
    simulate(run(fleet))
    quick, slow = (stats.lane_rounds for stats in fleet.stats("verifier"))
    assert quick > 5 * slow


@pytest.mark.parametrize("splits", [0.05, 0.5])
def test_lanes_in_the_making_are_bounded(splits: float) -> None:
    fleet = SimulatedFleet(replace(SHAPE, strategies=8, splits=splits, shard_size=200))
    simulate(run(fleet))
    # New examples wait while more than four times a bank's slots of lanes do, and each lane can
    # become one for each of its strategies.
    bound = (4 + SHAPE.banks) * SHAPE.slots * 8
    assert 0 < fleet.workers[0].most_waiting <= bound


def test_shards_are_read_when_they_are_needed() -> None:
    shape = replace(SHAPE, drafters=2, shard_size=10)
    dealt: list[int] = []
    most = 0

    async def main() -> None:
        nonlocal most
        async with SimulatedFleet(shape) as fleet:
            done = 0
            async for _ in fleet.leases(noted(shape.shards(2000), dealt)):
                most = max(most, len(dealt) - done)
                done += 1

    simulate(main())
    assert len(dealt) == 2000 // shape.shard_size
    # A drafter's unfinished shards: at worst one for each slot, whose last text is being decoded;
    # those that wait, fewer examples than there are slots; and the one taken last. Besides, two
    # finished ones a drafter wait to be written, and one is in hand and one on its way.
    slots = shape.banks * shape.slots
    held = slots + slots // shape.shard_size + 1
    bound = shape.drafters * (held + 2) + 2
    assert most <= bound < len(dealt) / 2


def noted(shards: Iterator[Shard], dealt: list[int]) -> Iterator[Shard]:
    """The shards, each noted when it is taken."""
    for shard in shards:
        dealt.append(shard.index)
        yield shard
