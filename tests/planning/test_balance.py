"""Block sizes and ratios: the formulas against what they are said to be."""

from __future__ import annotations

import random

import pytest

from pipeline.planning.balance import (
    Steps,
    advise,
    best_block_size,
    tokens_per_actor_second,
    tokens_per_round,
)
from pipeline.planning.calls import Assumed, expected_calls, rounds_per_text
from pipeline.protocol.strategies import Execution
from pipeline.records import Bonus, Setting, Strategy


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("block_size", [1, 4, 9])
def test_tokens_of_a_round_follow_equation_one(acceptance: float, block_size: int) -> None:
    closed = (1 - acceptance ** (block_size + 1)) / (1 - acceptance)
    assert tokens_per_round(acceptance, block_size) == pytest.approx(closed)


def test_a_drafter_that_is_always_right_gives_the_block_and_the_bonus() -> None:
    assert tokens_per_round(1.0, 5) == 6


@pytest.mark.parametrize("bonus", ["verifier", "target"])
def test_tokens_of_a_round_are_those_of_accepting_one_by_one(bonus: Bonus) -> None:
    setting = Setting(block_size=4, max_new_tokens=1, bonus=bonus)
    chance, rounds = random.Random(0), 40_000

    def advance() -> int:
        for accepted in range(setting.draft_length):
            if chance.random() >= 0.7:
                return accepted + 1  # the residual
        return setting.draft_length + (bonus == "verifier")

    mean = sum(advance() for _ in range(rounds)) / rounds
    # Standard error 0.009.
    assert mean == pytest.approx(tokens_per_round(0.7, setting.block_size), abs=0.04)


def test_the_best_block_is_the_best_of_all() -> None:
    steps = Steps(0.001, 0.01)
    rates = {size: tokens_per_actor_second(steps, 0.8, size) for size in range(1, 17)}
    assert rates[best_block_size(steps, 0.8)] == max(rates.values())
    assert 1 < best_block_size(steps, 0.8) < 16


def test_cheap_drafts_and_good_ones_make_blocks_long() -> None:
    sizes = [best_block_size(Steps(cost, 1.0), 0.8) for cost in (1.0, 0.1, 0.001)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert best_block_size(Steps(0.1, 1.0), 0.2) < best_block_size(Steps(0.1, 1.0), 0.9)


@pytest.mark.parametrize(
    ("drafter", "verifier", "ratio"),
    [(0.005, 0.02, (1, 1)), (0.005, 0.08, (1, 4)), (0.02, 0.02, (4, 1)), (1e-6, 1.0, (1, 16))],
)
def test_a_ratio_keeps_both_busy(drafter: float, verifier: float, ratio: tuple[int, int]) -> None:
    advice = advise(Steps(drafter, verifier), 0.6, block_size=4)
    assert (advice.drafters, advice.verifiers) == ratio


def test_the_gain_is_that_over_the_jobs_own_block() -> None:
    steps = Steps(0.001, 0.01)
    best = best_block_size(steps, 0.8)
    assert advise(steps, 0.8, best).gain == 0
    assert advise(steps, 0.8, 1).gain == pytest.approx(
        tokens_per_actor_second(steps, 0.8, best) / tokens_per_actor_second(steps, 0.8, 1) - 1
    )


def test_each_kind_of_strategy_has_its_calls() -> None:
    strategies = [
        Strategy("drafter"),
        Strategy("verifier"),
        Strategy("spec_decode"),
        Strategy("spec_cascade.opt", alpha=0.1),
        Strategy("token_cascade.chow", alpha=0.1),
        Strategy("oracle_cascade.diff", alpha=0.1),
    ]
    setting = Setting(block_size=1, max_new_tokens=30)
    calls = expected_calls(strategies, [setting], Assumed(acceptance=0.5, tokens=30))
    assert {c.execution: (c.strategies, c.drafter, c.verifier) for c in calls} == {
        Execution.DRAFTER_ONLY: (1, 30, 0),
        Execution.VERIFIER_ONLY: (1, 0, 30),
        Execution.SPECULATIVE: (2, 20, 20),
        Execution.SEQUENTIAL: (1, 30, 15),
        Execution.ORACLE: (1, 30, 30),
    }


def test_rounds_are_the_mean_over_settings() -> None:
    settings = [Setting(block_size=size, max_new_tokens=30) for size in (1, 3)]
    assert rounds_per_text(settings, Assumed(1.0, 24)) == (24 / 2 + 24 / 4) / 2
