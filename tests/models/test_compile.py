"""Compiled steps say what eager ones say, and are compiled once.

Planted faults these tests catch: idle rows that write into lanes' columns; a shape for each number of
lanes (compiled again and again).
"""

from __future__ import annotations

import pytest
import torch

from pipeline.models.caching import CachedModel
from pipeline.records import Sampling, Setting, Strategy
from tests.loop import decode
from tests.tiny import EOS, slot_model

PROMPTS = [list(range(3, 3 + length)) for length in (4, 9, 2, 17, 6, 11)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", ["llama", "t5_relu"])
def test_compiled_models_write_what_eager_ones_write(name: str) -> None:
    setting = Setting(3, 12, Sampling(0.0), eos_token_ids=(EOS,))
    eager = [slot_model(name, seed) for seed in (1, 0)]
    compiled = [slot_model(name, seed) for seed in (1, 0)]
    for model in compiled:
        assert isinstance(model, CachedModel)
        model.compile()
    counters = torch._dynamo.utils.counters
    counters.clear()
    strategies = [Strategy("spec_decode"), Strategy("spec_cascade.diff", alpha=0.1)]
    expected = decode(*eager, PROMPTS, strategies, setting, slots=4)
    got = decode(*compiled, PROMPTS, strategies, setting, slots=4)
    assert {key: outcome.output_ids for key, outcome in got.items()} == {
        key: outcome.output_ids for key, outcome in expected.items()
    }
    # Two models, and for each the first drafting step, the others, and verification at the end of
    # budgets: blocks of 1, 2 and 3 tokens. T5's compiled graph is in three pieces.
    assert 0 < counters["stats"]["unique_graphs"] <= 3 * 2 * 5
    assert not counters["recompile_limit"]
