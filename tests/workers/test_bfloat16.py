"""Models in bfloat16: what is drawn from is still float32 and sums to one, and slots do not matter.

Planted faults these tests catch: a cross-attention mask of another dtype than the model's; logits that
stay in bfloat16 on their way out.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from pipeline.models.interface import SlotContent
from pipeline.protocol.distributions import confidence, sampling_distribution
from pipeline.records import Outcome, Sampling, Setting
from tests.loop import Outcomes, decode
from tests.models.test_slots import every_model, feed, text, uncached
from tests.strategies import one_of_each
from tests.tiny import CAUSAL, EOS, SEQ2SEQ, hf_model, slot_model

BFLOAT16 = torch.bfloat16


def is_batch_invariant() -> bool:
    """Whether products and attention of this machine give rows of bfloat16 the same bits in any number."""
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in ((32, 32), (32, 64), (64, 32), (32, 61)):
        rows, weights = (
            torch.randn(shape, generator=generator).to(BFLOAT16)
            for shape in ((96, inputs), (outputs, inputs))
        )
        whole = linear(rows, weights)
        if not all(torch.equal(linear(rows[:n], weights), whole[:n]) for n in (4, 5, 8, 17, 64)):
            return False
    query, key = (torch.randn(8, 4, 32, 8, generator=generator).to(BFLOAT16) for _ in range(2))
    mask = torch.zeros(8, 1, 32, 32, dtype=BFLOAT16)
    whole = scaled_dot_product_attention(query, key, key, attn_mask=mask)
    return all(
        torch.equal(
            scaled_dot_product_attention(query[:n], key[:n], key[:n], attn_mask=mask[:n]),
            whole[:n],
        )
        for n in (1, 3, 8)
    )


invariant = pytest.mark.skipif(
    not is_batch_invariant(), reason="this CPU's bfloat16 products depend on the number of rows"
)
every_family = pytest.mark.parametrize("name", [CAUSAL[0], CAUSAL[1], *SEQ2SEQ])
every_temperature = pytest.mark.parametrize("temperature", [0.0, 0.8])


def outcomes(name: str, temperature: float, slots: int) -> Outcomes:
    pair = slot_model(name, 2, dtype=BFLOAT16), slot_model(name, 1, dtype=BFLOAT16)
    prompts = [[3 + (7 * i) % 50 for i in range(length)] for length in (1, 4, 19)]
    setting = Setting(3, 9, Sampling(temperature), seed=4, eos_token_ids=(EOS,))
    return decode(*pair, prompts, one_of_each(greedy=temperature == 0), setting, slots)


def determined(outcome: Outcome) -> str:
    """As text, since a loss may be NaN, which equals nothing."""
    return repr(replace(outcome, wall_seconds=0.0))


@every_family
@every_temperature
def test_texts_come_to_an_end_without_an_error(name: str, temperature: float) -> None:
    for outcome in outcomes(name, temperature, slots=4).values():
        assert outcome.error is None
        assert outcome.output_ids
        assert outcome.finish_reason == ("stop" if outcome.output_ids[-1] == EOS else "length")
        assert torch.tensor(outcome.risk.expected_rejected).isfinite()
        assert torch.tensor(outcome.log_confidence).isfinite()


@invariant
@every_family
@every_temperature
def test_the_number_of_slots_does_not_matter(name: str, temperature: float) -> None:
    of_slots = [
        {key: determined(row) for key, row in outcomes(name, temperature, slots).items()}
        for slots in (1, 4, 32)
    ]
    assert of_slots[0] == of_slots[1] == of_slots[2]


@every_model
def test_probabilities_are_float32_and_sum_to_one(name: str) -> None:
    bank = slot_model(name, dtype=BFLOAT16).bank(2)
    bank.open([SlotContent(0, text(9, 0), text(4, 1)), SlotContent(1, text(3, 2))])
    logits = feed(bank, [[3, 4, 5], [0, 4, 5]], [3, -1])
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()
    for sampling in (Sampling(0.0), Sampling(1.0), Sampling(0.6, top_k=9, top_p=0.9, min_p=0.01)):
        probs = sampling_distribution(logits, sampling)
        assert (probs.double().sum(dim=-1) - 1).abs().max() < 1e-6
    assert (confidence(logits).double().sum(dim=-1) - 1).abs().max() < 1e-6


@every_model
def test_logits_are_those_of_float32_up_to_rounding(name: str) -> None:
    bank = slot_model(name, dtype=BFLOAT16).bank(1)
    prompt, output = text(9, 0), text(5, 1)
    bank.open([SlotContent(0, prompt)])
    got = feed(bank, [[0, *output]], [-1])[0]
    exact = uncached(hf_model(name), prompt, output)
    rounded = uncached(hf_model(name).to(BFLOAT16), prompt, output).float()
    allowed = 3 * (rounded - exact).abs().max() + 0.02 * exact.abs().max()
    assert (got - exact).abs().max() < allowed
