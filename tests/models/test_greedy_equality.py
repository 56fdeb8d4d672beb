"""Greedy speculative decoding is the verifier's `generate`, token for token, for both families."""

from __future__ import annotations

import random

import pytest
import torch

from pipeline.records import Sampling, Setting, Strategy
from tests.loop import decode
from tests.tiny import CAUSAL, EOS, SEQ2SEQ, VOCABULARY, hf_model, slot_model

NEW_TOKENS = 24


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of very different lengths, the first of one token."""
    source = random.Random(seed)
    lengths = [1, *(source.randint(2, 40) for _ in range(count - 1))]
    return [[source.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def generated(name: str, prompt: list[int]) -> list[int]:
    model = hf_model(name, seed=1)
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
    )[0].tolist()
    return output[1:] if name in SEQ2SEQ else output[len(prompt) :]


@pytest.mark.parametrize("name", [*CAUSAL, *SEQ2SEQ])
def test_speculation_equals_generate(name: str) -> None:
    examples = prompts(32)
    expected = [generated(name, prompt) for prompt in examples]
    assert len({tuple(text) for text in expected}) > 20, (
        "the tiny model says the same to everything"
    )
    drafter, verifier = slot_model(name, seed=2), slot_model(name, seed=1)
    for block_size in (1, 2, 3, 5, 8):
        setting = Setting(block_size, NEW_TOKENS, Sampling(0.0), eos_token_ids=(EOS,))
        for slots, count in ((1, 3), (4, 10), (32, 32)):
            outcomes = decode(
                drafter, verifier, examples[:count], [Strategy("spec_decode")], setting, slots=slots
            )
            for index, text in enumerate(expected[:count]):
                got = list(outcomes[str(index), 0, "spec_decode"].output_ids)
                assert got == text, f"{block_size=} {slots=} example {index}"


@pytest.mark.parametrize("name", ["llama", "t5_relu"])
def test_a_drafter_that_is_the_verifier_is_always_accepted(name: str) -> None:
    model, twin = slot_model(name, seed=1), slot_model(name, seed=1)
    for block_size in (1, 3, 8):
        setting = Setting(block_size, NEW_TOKENS, Sampling(1.0), eos_token_ids=(EOS,))
        outcomes = decode(twin, model, prompts(8), [Strategy("spec_decode")], setting)
        counts = [outcome.counts for outcome in outcomes.values()]
        assert sum(count.rejected for count in counts) == 0
        assert sum(count.accepted for count in counts) == sum(count.drafted for count in counts)
