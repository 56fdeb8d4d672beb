"""The simulation against closed formulas, and against real engines and queues in simulated time."""

from __future__ import annotations

import asyncio
import time

import pytest

from pipeline.planning import simulation
from pipeline.planning.simulation import Forecast, Pipeline, forecast
from tests.simulated import Shape, SimulatedFleet, simulate


def dealt(drafters: int, verifiers: int, banks: int) -> list[list[int]]:
    """The verifier of each bank of each drafter where no links are given."""
    return [[(d + bank * drafters) % verifiers for bank in range(banks)] for d in range(drafters)]


def one_to_one(banks: int, transfer: float = 0.0) -> Pipeline:
    return Pipeline(dealt(1, 1, banks), 1, 2.0, 3.0, transfer)


def test_a_single_bank_overlaps_nothing() -> None:
    found = forecast(one_to_one(1, transfer=0.5), 10)
    assert found.seconds == pytest.approx(10 * (2.0 + 3.0 + 0.5))
    assert (found.drafter_share, found.verifier_share) == pytest.approx((20 / 55, 30 / 55))


@pytest.mark.parametrize("banks", [2, 3, 7])
def test_two_banks_and_more_keep_the_slower_worker_busy(banks: int) -> None:
    # The first draft and the last verdict's way back are all that is not hidden.
    assert forecast(one_to_one(banks), 10).seconds == pytest.approx(2.0 + 10 * 3.0)
    assert forecast(one_to_one(banks, transfer=0.5), 10).seconds == pytest.approx(2.5 + 10 * 3.0)


def test_transfer_that_three_banks_cannot_hide_sets_the_rate() -> None:
    slow_way = forecast(one_to_one(3, transfer=30.0), 30)
    assert slow_way.seconds == pytest.approx(30 / 3 * 35.0, rel=0.05)


def test_verifiers_share_the_work_of_a_quick_drafter() -> None:
    found = forecast(Pipeline(dealt(1, 3, 6), 3, 1.0, 3.0), 300)
    assert found.seconds == pytest.approx(300.0, rel=0.03)
    assert found.verifier_share == pytest.approx(1.0, rel=0.03)


def test_spread_keeps_the_mean_and_costs_time() -> None:
    def seconds(spread: float) -> float:
        return forecast(Pipeline(dealt(1, 1, 2), 1, 3.0, 3.0, spread=spread), 120).seconds

    assert seconds(0.0) == pytest.approx(363.0)
    assert 1.02 < seconds(0.5) / seconds(0.0) < 1.5
    alone = Pipeline(dealt(1, 1, 1), 1, 0.0, 3.0, spread=0.5)
    assert forecast(alone, 60).seconds == pytest.approx(180, rel=0.25)


def test_a_long_run_goes_on_at_the_rate_of_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    # The way is long, so the fleet takes its time to fill and to run empty.
    pipeline = Pipeline(dealt(3, 2, 4), 2, 1.0, 1.7, 40.0)
    quick = forecast(pipeline, 20_000)
    monkeypatch.setattr(simulation, "WINDOW", 20_000)
    assert quick.seconds == pytest.approx(forecast(pipeline, 20_000).seconds, rel=0.002)


def test_nothing_to_do_takes_no_time() -> None:
    assert forecast(one_to_one(3), 0) == Forecast(0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("drafters", "verifiers", "banks"), [(1, 1, 3), (4, 1, 3), (1, 2, 4), (3, 2, 4), (5, 7, 7)]
)
def test_banks_are_dealt_as_the_fleet_deals_them(drafters: int, verifiers: int, banks: int) -> None:
    plan = Shape(drafters=drafters, verifiers=verifiers, banks=banks).plan()
    assert dealt(drafters, verifiers, banks) == [plan.verifiers_of(d) for d in range(drafters)]


@pytest.mark.parametrize(
    ("drafters", "verifiers", "banks", "draft_seconds", "link_seconds"),
    [
        (1, 1, 1, 0.005, 0.001),
        (1, 1, 3, 0.005, 0.001),
        (1, 1, 3, 0.020, 0.001),
        (1, 1, 3, 0.020, 0.050),
        (4, 1, 3, 0.070, 0.001),
        (1, 2, 4, 0.009, 0.004),
        (3, 2, 3, 0.030, 0.001),
    ],
)
def test_it_says_what_real_engines_and_queues_do(
    drafters: int, verifiers: int, banks: int, draft_seconds: float, link_seconds: float
) -> None:
    shape = Shape(
        drafters, verifiers, banks, draft_seconds=draft_seconds, link_seconds=link_seconds,
        strategies=2, rounds=4.0,
    )  # fmt: skip
    seconds, rounds, busy = simulate(decode(SimulatedFleet(shape), 3000))
    pipeline = Pipeline(
        dealt(drafters, verifiers, banks),
        verifiers,
        busy["drafter"] / rounds,
        busy["verifier"] / rounds,
        2 * link_seconds,
    )
    assert forecast(pipeline, rounds).seconds == pytest.approx(seconds, rel=0.06)


async def decode(fleet: SimulatedFleet, examples: int) -> tuple[float, int, dict[str, float]]:
    """Seconds, rounds and busy seconds of a role, of a whole run."""
    async with fleet:
        started = asyncio.get_running_loop().time()
        async for _ in fleet.leases(fleet.shape.shards(examples)):
            pass
        seconds = asyncio.get_running_loop().time() - started
        rounds = sum(stats.rounds for stats in fleet.stats("drafter"))
        busy = {role: sum(fleet.busy_seconds(role)) for role in ("drafter", "verifier")}
    return seconds, rounds, busy


def test_a_thousand_drafters_take_seconds() -> None:
    started = time.process_time()
    pipeline = Pipeline(dealt(1000, 100, 3), 100, 0.01, 0.02, 0.002, spread=0.3)
    found = forecast(pipeline, 10_000_000)
    assert time.process_time() - started < 10
    assert found.seconds == pytest.approx(10_000_000 * 0.02 / 100, rel=0.02)
