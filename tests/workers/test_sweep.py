"""The whole table of strategies in one sweep: each has the rows it has alone, to the last bit.

Planted faults these tests catch: a pair judged with another's alpha, beta or fallback; a lane that split
off without its counts; a token behind the block shared by pairs that draw it in different roles.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.records import Outcome, Sampling, Setting, Strategy
from tests.loop import decode
from tests.models.test_slots import bitwise
from tests.strategies import AT_ANY_TEMPERATURE, DECODED_GREEDILY
from tests.tiny import EOS, slot_model

PROMPTS = [[5, 6], [9, 30, 2, 8, 11, 7]]


def determined(outcome: Outcome) -> str:
    """All but the time that it took, as text: a loss may be NaN, which equals nothing."""
    return repr(replace(outcome, wall_seconds=0.0))


@bitwise
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "t5_relu"])
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0)], ids=["greedy", "sampled"])
def test_every_strategy_has_in_a_sweep_the_rows_it_has_alone(name: str, sampling: Sampling) -> None:
    # A decoder-only drafter's context ends before the longer text does; T5 knows no end.
    pair = slot_model(name, 2, positions=12), slot_model(name, 1)
    setting = Setting(3, 8, sampling, seed=2, eos_token_ids=(EOS,))
    strategies = DECODED_GREEDILY if sampling.temperature == 0 else AT_ANY_TEMPERATURE

    def rows(of: list[Strategy], slots: int) -> dict[tuple[str, int, str], str]:
        outcomes = decode(*pair, PROMPTS, of, setting, slots)
        return {key: determined(outcome) for key, outcome in outcomes.items()}

    plentiful, scarce = rows(strategies, 32), rows(strategies[::-1], 2)
    assert len(plentiful) == len(PROMPTS) * len(strategies)
    assert plentiful == scarce
    alone = {key: row for strategy in strategies for key, row in rows([strategy], 2).items()}
    assert alone == plentiful
    assert len({row.split("output_ids=")[1].split(")")[0] for row in alone.values()}) > 10
