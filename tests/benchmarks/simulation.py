"""The pipeline without models: how well it keeps its workers busy, and what it costs itself.

Models sleep (see `tests.simulated`), in simulated time where nothing else is said: then a run gives
the same numbers on any machine. A window of steady work begins when a tenth of the shards are done
and ends when the last shard is dealt; behind it the fleet runs empty.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.fleet.scheduler import Scheduler
from pipeline.records import Shard, ShardResult
from tests.benchmarks.ratio import Ratio
from tests.simulated import Shape, SimulatedFleet, simulate

SEEDS = range(3)
BASE = Shape(strategies=2, rounds=4.0)
SHAPES = {
    "4:1": (replace(BASE, drafters=4, verifiers=1), 8_000),
    "1:2": (replace(BASE, drafters=1, verifiers=2), 4_000),
    "1:2, 4 banks": (replace(BASE, drafters=1, verifiers=2, banks=4), 4_000),
    "2:1": (replace(BASE, drafters=2, verifiers=1), 6_000),
    "8:2": (replace(BASE, drafters=8, verifiers=2), 20_000),
    "1:1, equal models": (replace(BASE, draft_seconds=0.02), 4_000),
    "56:8": (replace(BASE, drafters=56, verifiers=8), 50_000),
}
"""Fleets, and how many examples make a window of steady work for them."""

ACTORS = {4: (3, 1), 16: (14, 2), 64: (56, 8)}
EXAMPLES = (1_000, 4_000, 16_000)
MANY = 100_000


def measure() -> Iterator[Ratio]:
    """Efficiency and balance of fleets, then the pipeline's own time and memory."""
    for name, (shape, examples) in SHAPES.items():
        yield from efficiency(name, shape, examples)
    yield from in_real_time()
    yield from fills()
    yield from slow_writer()
    yield from overhead()
    yield from scheduling()
    yield from memory()


def efficiency(name: str, shape: Shape, examples: int) -> Iterator[Ratio]:
    """How busy the bottleneck is, and how evenly work is spread."""
    windows = [simulate(steady(replace(shape, seed=seed), examples)) for seed in SEEDS]
    busiest = windows[0].bottleneck
    shares = [window.share(busiest) for window in windows]
    yield Ratio(f"{name}: mean {busiest}'s busy seconds / time", shares, ">= 0.95")
    for role in ("drafter", "verifier"):
        if len(windows[0].busy[role]) > 1:
            values = [window.balance(role) for window in windows]
            yield Ratio(f"{name}: least / most busy {role}", values, ">= 0.9")


def in_real_time() -> Iterator[Ratio]:
    """The same with real sleeps: the pipeline's own time now counts, on one core for all actors."""
    shape, _ = SHAPES["4:1"]
    windows = [asyncio.run(steady(replace(shape, seed=seed), 4_000)) for seed in SEEDS]
    shares = [window.share("verifier") for window in windows]
    yield Ratio("4:1, real time: verifier's busy seconds / time", shares, ">= 0.95")


def fills() -> Iterator[Ratio]:
    """How many slots have a lane in them, when nothing splits: only leases can fill them then."""
    for size in (50, 256):
        shape = replace(BASE, strategies=1, shard_size=size)
        windows = [simulate(steady(replace(shape, seed=seed), 4_000)) for seed in SEEDS]
        values = [window.fill for window in windows]
        yield Ratio(f"1:1, one strategy, shards of {size}: lanes / slots", values, ">= 0.9")


def slow_writer() -> Iterator[Ratio]:
    """The driver writes shards one after the other; here it is at it half of the time."""
    shape, examples = SHAPES["4:1"][0], 4_000
    plain = simulate(steady(shape, examples))
    pause = 0.5 * plain.seconds / plain.shards
    windows = [simulate(steady(replace(shape, seed=seed), examples, pause)) for seed in SEEDS]
    shares = [window.share("verifier") for window in windows]
    yield Ratio("4:1, writing half of the time: verifier's share", shares, ">= 0.95")


def overhead() -> Iterator[Ratio]:
    """CPU time of engines and scheduler, and of the workers' own accounts."""
    sizes = [(actors, examples) for actors in ACTORS for examples in EXAMPLES]
    costs = {size: asyncio.run(cost(*size)) for size in sizes}
    smallest, largest = costs[sizes[0]], costs[sizes[-1]]
    for index, what in enumerate(("engines and scheduler", "workers' accounts")):
        others = [costs[size][index] / smallest[index] for size in sizes[1:]]
        yield Ratio(f"{what}: CPU µs a round, 64 actors", [largest[index] * 1e6], "report")
        yield Ratio(f"{what}: a round, 8 larger sizes / smallest", others, "<= 1.5")


def scheduling() -> Iterator[Ratio]:
    """What leasing a shard costs the driver, which there is only one of."""
    few = [asyncio.run(lease_seconds(drafters=4)) for _ in SEEDS]
    many = [asyncio.run(lease_seconds(drafters=448)) for _ in SEEDS]
    yield Ratio("scheduler: µs a shard, 4 drafters", [1e6 * each for each in few], "report")
    ratios = [b / a for a, b in zip(few, many, strict=True)]
    yield Ratio("scheduler: a shard, 448 drafters / 4", ratios, "<= 1.5")


def memory() -> Iterator[Ratio]:
    """Whether a run's memory grows with its examples."""
    gc.collect()
    gc.freeze()  # what the libraries hold need not be looked through again and again
    tracemalloc.start()
    early, late = asyncio.run(traced_bytes(MANY))
    tracemalloc.stop()
    gc.unfreeze()
    yield Ratio(f"memory after {MANY} examples, MB more", [(late - early) / 1e6], "report")
    yield Ratio("memory: ninth tenth of examples / second", [late / early], "<= 1.05")


# --- one run ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """What a fleet has done at one moment."""

    time: float
    busy: dict[str, list[float]]
    rounds: int
    lane_rounds: int

    @classmethod
    def of(cls, fleet: SimulatedFleet) -> Reading:
        """Now."""
        stats = fleet.stats("drafter")
        return cls(
            asyncio.get_running_loop().time(),
            {role: fleet.busy_seconds(role) for role in ("drafter", "verifier")},
            sum(each.rounds for each in stats),
            sum(each.lane_rounds for each in stats),
        )


@dataclass(frozen=True)
class Window:
    """What a fleet did in some time of steady work."""

    seconds: float
    busy: dict[str, list[float]]
    fill: float
    """Mean share of slots in use."""
    shards: int

    @property
    def bottleneck(self) -> str:
        """The busier role."""
        return max(self.busy, key=self.share)

    def share(self, role: str) -> float:
        """Mean busy share of a role's workers."""
        return statistics.mean(self.busy[role]) / self.seconds

    def balance(self, role: str) -> float:
        """Busy seconds of the least busy worker over those of the busiest."""
        return min(self.busy[role]) / max(self.busy[role])


async def steady(shape: Shape, examples: int, write_seconds: float = 0.0) -> Window:
    """Run a fleet, and look at it while it has enough to do."""
    readings: list[Reading] = []
    finished: list[int] = []

    async with SimulatedFleet(shape) as fleet:

        def dealt() -> Iterator[Shard]:
            yield from shape.shards(examples)
            readings.append(Reading.of(fleet))
            finished.append(done)

        done, tenth = 0, max(1, examples // shape.shard_size // 10)
        async for lease in fleet.leases(dealt()):
            assert len(lease.result.outcomes) == len(lease.shard.examples) * shape.strategies
            done += 1
            if done == tenth:
                readings.append(Reading.of(fleet))
            await asyncio.sleep(write_seconds)
    before, after = readings
    assert finished[0] > tenth, "too few examples: all were dealt before a tenth were done"
    rounds = after.rounds - before.rounds
    return Window(
        after.time - before.time,
        {
            role: [b - a for a, b in zip(before.busy[role], after.busy[role], strict=True)]
            for role in before.busy
        },
        (after.lane_rounds - before.lane_rounds) / rounds / shape.slots,
        finished[0] - tenth,
    )


async def cost(actors: int, examples: int) -> tuple[float, float]:
    """CPU seconds a round: of engines and scheduler, and of the workers' accounts; models do nothing."""
    drafters, verifiers = ACTORS[actors]
    shape = unpaused(replace(BASE, drafters=drafters, verifiers=verifiers))
    async with SimulatedFleet(shape) as fleet:
        started = time.process_time()
        async for _ in fleet.leases(shape.shards(examples)):
            pass
        total = time.process_time() - started
        rounds = sum(stats.rounds for stats in fleet.stats("verifier"))
        accounts = sum(compute.cpu_seconds for compute in fleet.computes.values())
    return (total - accounts) / rounds, accounts / rounds


class IdleDrafter:
    """Finishes a shard in the next turn of the event loop."""

    name = "idle"

    async def take(self, shard: Shard) -> int:
        """Nothing."""
        await asyncio.sleep(0)
        return shard.index

    async def outcomes(self, ticket: int) -> ShardResult:
        """Nothing."""
        await asyncio.sleep(0)
        return ShardResult(ticket, (), self.name, "", "")

    async def recover(self) -> None:
        """It never fails."""


async def lease_seconds(drafters: int, shards: int = 5_000) -> float:
    """CPU seconds that the scheduler takes for a shard. A few shards finish at any time."""
    source = (Shard(index, ()) for index in range(shards))
    started = time.process_time()
    async for _ in Scheduler([IdleDrafter() for _ in range(drafters)]).leases(source):
        pass
    return (time.process_time() - started) / shards


async def traced_bytes(examples: int) -> tuple[float, float]:
    """Mean bytes in use in the second and in the ninth tenth of a run of many shards."""
    shape = unpaused(replace(BASE, drafters=2, banks=2, slots=16, rounds=2.0))
    tenth = examples // shape.shard_size // 10
    used: dict[int, list[int]] = {1: [], 8: []}
    done = 0
    async with SimulatedFleet(shape) as fleet:
        async for _ in fleet.leases(shape.shards(examples)):
            if done // tenth in used and done % 10 == 0:
                gc.collect()
                used[done // tenth].append(tracemalloc.get_traced_memory()[0])
            done += 1
    return statistics.mean(used[1]), statistics.mean(used[8])


def unpaused(shape: Shape) -> Shape:
    """The same fleet with models and links that take no time."""
    return replace(shape, draft_seconds=0.0, verify_seconds=0.0, link_seconds=0.0)
