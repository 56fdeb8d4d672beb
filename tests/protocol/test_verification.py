"""The engine against the reference: tokens and every count, on thousands of small texts.

The reference (`tests/reference.py`) decodes one example under one strategy, token by token, from the
paper; the engine decodes all of them together. Equal tokens with equal chance mean equal law, and
equal counts mean that a strategy is charged what it would cost alone.

Planted faults these tests catch: bonus drawn with the draft's uniform; bonus beyond the budget or
behind an end-of-text token; residual max(0, q - p); acceptance u q <= mass with the wrong uniform;
deferrals counted beyond the first rejection; an oracle peek at drafted tokens behind EOS; strategies
of a lane judged with another's alpha; positions counted from the block instead of the text.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from pipeline.models.toy import TableModel
from pipeline.protocol.strategies import KINDS, sweep
from pipeline.protocol.verification import Block, Pairs, verify
from pipeline.records import Outcome, Sampling, Setting, Strategy
from tests import reference
from tests.loop import decode
from tests.tiny import CAUSAL, EOS, SEQ2SEQ, VOCABULARY, hf_model, slot_model

ALPHAS: dict[str, list[float]] = {
    "token_cascade.chow": [0.0, 0.3, 0.5, 0.7, 1.0],
    "lossy_spec_decode": [0.0, 0.2, 0.6, 0.95],
    "spec_cascade.chow": [0.0, 0.3, 0.5, 0.7, 1.0],
    "spec_cascade.diff": [-1.0, -0.2, 0.0, 0.15, 0.3, 1.0],
    "spec_cascade.opt": [-50.0, -0.4, 0.0, 0.3, 0.6, 2.0],
    "spec_cascade.token_v3": [-1.0, 0.0, 0.3, 0.7, 1.0],
}

STRATEGIES = [strategy for use in KINDS for strategy in sweep(use, ALPHAS.get(use))]
FULL = Sampling(1.0)
SAMPLINGS = [Sampling(0.0), Sampling(0.5), FULL, Sampling(1.3, top_k=4, top_p=0.9)]


def tables(vocabulary: int, seed: int, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    """Logits of a drafter and of a verifier that partly agrees with it, (V, V) each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (vocabulary, vocabulary)
    drafter = spread * torch.randn(shape, generator=generator)
    return drafter, drafter + spread * torch.randn(shape, generator=generator)


def as_reference(drafter: Tensor, verifier: Tensor) -> reference.Models:
    return reference.Models(reference.table_model(drafter), reference.table_model(verifier))


def same(outcome: Outcome, expected: reference.Decoded) -> bool:
    return (outcome.output_ids, outcome.finish_reason, outcome.counts) == (
        expected.output_ids, expected.finish_reason, expected.counts,
    )  # fmt: skip


def assert_equals_reference(
    outcomes: dict[tuple[str, int, str], Outcome],
    models: reference.Models,
    prompts: list[list[int]],
    setting: Setting,
) -> None:
    assert len(outcomes) == len(prompts) * setting.repeats * len(STRATEGIES)
    for (example_id, repeat, label), outcome in outcomes.items():
        prompt = prompts[int(example_id)]
        expected = reference.decode(models, prompt, example_id, repeat, outcome.strategy, setting)
        assert same(outcome, expected), f"{label} on {example_id}: {outcome} is not {expected}"


@pytest.mark.parametrize("bonus", ["verifier", "target"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "half", "full", "top-k and top-p"])
@pytest.mark.parametrize("block_size", [1, 2, 5, 8])
def test_tokens_and_counts_equal_the_reference(
    block_size: int, sampling: Sampling, bonus: str
) -> None:
    drafter, verifier = tables(vocabulary=7, seed=block_size)
    # Length limits below, at and just beyond a block, and texts that end by themselves.
    for budget in (1, block_size, block_size + 1, 2 * block_size + 3):
        setting = Setting(
            block_size, budget, sampling, bonus, seed=7, repeats=2, eos_token_ids=(1, 5)
        )
        prompts = [[token, 6 - token] for token in range(4)]
        outcomes = decode(
            TableModel(drafter), TableModel(verifier), prompts, STRATEGIES, setting, slots=32
        )
        assert_equals_reference(outcomes, as_reference(drafter, verifier), prompts, setting)


@pytest.mark.parametrize("name", [CAUSAL[0], CAUSAL[1], SEQ2SEQ[0]])
def test_real_architectures_equal_the_reference_without_caches(name: str) -> None:
    setting = Setting(3, 9, Sampling(0.7), seed=1, eos_token_ids=(EOS,))
    source = random.Random(0)
    prompts = [[source.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 4, 20)]
    outcomes = decode(
        slot_model(name, 2), slot_model(name, 1), prompts, STRATEGIES, setting, slots=16
    )
    wrap = reference.seq2seq_model if name in SEQ2SEQ else reference.causal_model
    models = reference.Models(
        wrap(hf_model(name, 2), VOCABULARY), wrap(hf_model(name, 1), VOCABULARY)
    )
    assert_equals_reference(outcomes, models, prompts, setting)


def rows_of(outcomes: dict[tuple[str, int, str], Outcome]) -> dict[tuple[str, int, str], tuple]:
    return {
        key: (outcome.output_ids, outcome.finish_reason, outcome.counts, outcome.error)
        for key, outcome in outcomes.items()
    }


@pytest.fixture(scope="module")
def rows_of_a_sweep() -> dict[tuple[str, int, str], tuple]:
    return rows_of(_sweep(STRATEGIES, slots=4, banks=1))


def _sweep(
    strategies: list[Strategy], slots: int, banks: int
) -> dict[tuple[str, int, str], Outcome]:
    drafter, verifier = tables(vocabulary=9, seed=3)
    setting = Setting(3, 10, FULL, seed=2, repeats=2, eos_token_ids=(0,))
    prompts = [[token] for token in range(1, 6)]
    return decode(
        TableModel(drafter), TableModel(verifier), prompts, strategies, setting, slots, banks
    )


@pytest.mark.parametrize(("slots", "banks"), [(1, 1), (1, 3), (4, 3), (32, 1), (32, 3)])
def test_rows_do_not_depend_on_slots_and_banks(
    rows_of_a_sweep: dict, slots: int, banks: int
) -> None:
    assert rows_of(_sweep(STRATEGIES, slots, banks)) == rows_of_a_sweep


def test_a_strategy_alone_gives_the_rows_it_gives_among_others(rows_of_a_sweep: dict) -> None:
    assert len({row[0] for row in rows_of_a_sweep.values()}) > 50, "the strategies all agree"
    for strategy in STRATEGIES:
        alone = rows_of(_sweep([strategy], slots=4, banks=1))
        assert len(alone) == 10
        for key, row in alone.items():
            assert row == rows_of_a_sweep[key], key


def test_the_order_of_the_strategies_does_not_matter(rows_of_a_sweep: dict) -> None:
    assert rows_of(_sweep(STRATEGIES[::-1], slots=4, banks=1)) == rows_of_a_sweep


def test_a_target_bonus_makes_the_text_independent_of_the_block_size() -> None:
    """With the verifier's bonus the law of a cascade depends on the block size, and is not the target."""
    drafter, verifier = tables(vocabulary=8, seed=5)
    prompts = [[token] for token in range(8)]

    def texts(bonus: str, block_size: int) -> dict:
        setting = Setting(block_size, 15, FULL, bonus)
        outcomes = decode(
            TableModel(drafter), TableModel(verifier), prompts, STRATEGIES, setting, slots=32
        )
        return {key: outcome.output_ids for key, outcome in outcomes.items()}

    assert texts("target", 1) == texts("target", 4) == texts("target", 8)
    assert texts("verifier", 1) != texts("verifier", 4)


def test_no_token_without_target_mass_is_ever_committed() -> None:
    """Verifier [.5, .5, 0], drafter [.9, .1, 0], 10 000 keys: the third token never appears."""
    lanes, columns = 10_000, 2
    drafter = torch.tensor([0.9, 0.1, 0.0]).log().expand(lanes, columns, 3)
    verifier = torch.tensor([0.5, 0.5, 0.0]).log().expand(lanes, columns + 1, 3)
    block = Block(
        tokens=torch.zeros(lanes, columns, dtype=torch.long),
        drafter_logits=drafter,
        num_drafted=torch.full((lanes,), columns),
        budgets=torch.full((lanes,), 9),
        starts=torch.zeros(lanes, dtype=torch.long),
        keys=torch.arange(lanes),
        repeats=torch.zeros(lanes, dtype=torch.long),
    )
    pairs = Pairs(torch.arange(lanes), torch.zeros(lanes, dtype=torch.long))
    verdicts = verify(block, verifier, pairs, [Strategy("spec_decode")], Setting(columns, 9))
    assert (verdicts.tokens < 2).all()
    assert set(verdicts.num_tokens.tolist()) == {1, 2, 3}
    rejected_first = verdicts.num_tokens == 1
    assert (verdicts.tokens[rejected_first, 0] == 1).all(), (
        "the residual is all on the second token"
    )
