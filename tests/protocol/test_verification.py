"""The engine against the reference: tokens and every count, on thousands of small texts.

The reference (`tests/reference.py`) decodes one example under one strategy, token by token, from the
paper; the engine decodes all of them together. Equal tokens with equal chance mean equal law, and
equal counts mean that a strategy is charged what it would cost alone.

Planted faults these tests catch: bonus drawn with the draft's uniform; bonus beyond the budget or
behind an end-of-text token; residual max(0, q - p); acceptance u q <= mass with the wrong uniform;
deferrals counted beyond the first rejection; an oracle peek at drafted tokens behind EOS; strategies
of a lane judged with another's alpha; the residual token of another pair's position; positions counted
from the block instead of the text.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipeline.models.toy import TableModel
from pipeline.protocol.blocks import Block, Pairs
from pipeline.protocol.sequence import cascade, decoded
from pipeline.protocol.strategies import target_of
from pipeline.protocol.verification import verify
from pipeline.records import Bonus, Outcome, Sampling, Setting, Strategy
from tests import reference
from tests.loop import Outcomes, decode
from tests.strategies import AT_ANY_TEMPERATURE, DECODED_GREEDILY, EVERY, one_of_each
from tests.tiny import CAUSAL, EOS, SEQ2SEQ, VOCABULARY, hf_model, slot_model

FULL = Sampling(1.0)
SAMPLINGS = [Sampling(0.0), FULL, Sampling(0.6, top_k=4, top_p=0.9)]
SWEEP = AT_ANY_TEMPERATURE[::3]


def tables(vocabulary: int, seed: int, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    """Logits of a drafter and of a verifier that partly agrees with it, (V, V) each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (vocabulary, vocabulary)
    drafter = spread * torch.randn(shape, generator=generator)
    return drafter, drafter + spread * torch.randn(shape, generator=generator)


def as_reference(drafter: Tensor, verifier: Tensor) -> reference.Models:
    return reference.Models(reference.table_model(drafter), reference.table_model(verifier))


def assert_same(outcome: Outcome, expected: reference.Decoded) -> None:
    got = (outcome.output_ids, outcome.finish_reason, outcome.counts)
    assert got == (expected.output_ids, expected.finish_reason, expected.counts), outcome
    sums = outcome.risk.expected_rejected, outcome.risk.expected_loss, outcome.log_confidence
    assert sums == pytest.approx(
        (expected.expected_rejected, expected.expected_loss, expected.log_confidence),
        abs=1e-4,
        nan_ok=True,
    ), outcome


def assert_equals_reference(
    outcomes: Outcomes,
    models: reference.Models,
    prompts: list[list[int]],
    setting: Setting,
) -> None:
    for (example_id, repeat, _), outcome in outcomes.items():
        prompt = prompts[int(example_id)]
        expected = reference.decode(models, prompt, example_id, repeat, outcome.strategy, setting)
        assert_same(outcome, expected)


def decodable(sampling: Sampling) -> list[Strategy]:
    return DECODED_GREEDILY if sampling.temperature == 0 else AT_ANY_TEMPERATURE


@pytest.mark.parametrize("bonus", ["verifier", "target"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "full", "truncated"])
@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_tokens_and_counts_equal_the_reference(
    block_size: int, sampling: Sampling, bonus: Bonus
) -> None:
    drafter, verifier = tables(vocabulary=7, seed=block_size)
    prompts = [[token, 6 - token] for token in range(3)]
    # Length limits just beyond a block and further on, and texts that end by themselves.
    for budget in (block_size + 1, 2 * block_size + 2):
        setting = Setting(block_size, budget, sampling, bonus=bonus, seed=7, eos_token_ids=(1, 5))
        strategies = decodable(sampling)
        outcomes = decode(
            TableModel(drafter), TableModel(verifier), prompts, strategies, setting, slots=32
        )
        assert len(outcomes) == len(prompts) * len(strategies)
        assert_equals_reference(outcomes, as_reference(drafter, verifier), prompts, setting)


def test_each_model_may_have_its_own_sampling() -> None:
    drafter, verifier = tables(vocabulary=7, seed=4)
    setting = Setting(3, 12, Sampling(0.7), Sampling(1.5, top_k=5), seed=3)
    prompts = [[token] for token in range(6)]
    outcomes = decode(
        TableModel(drafter), TableModel(verifier), prompts, AT_ANY_TEMPERATURE, setting, slots=32
    )
    assert_equals_reference(outcomes, as_reference(drafter, verifier), prompts, setting)


def test_sequence_cascades_follow_from_the_rows_of_the_two_models() -> None:
    drafter, verifier = tables(vocabulary=7, seed=6)
    setting = Setting(3, 6, FULL, seed=3, eos_token_ids=(2,))
    prompts = [[token] for token in range(7)] * 4
    cascades = [strategy for strategy in EVERY if strategy.use == "sequence_cascade.chow"]
    asked = [Strategy("spec_decode"), *cascades]
    assert decoded(asked) == (asked[0], Strategy("drafter"), Strategy("verifier"))
    assert decoded([asked[0]]) == (asked[0],)
    rows = decode(TableModel(drafter), TableModel(verifier), prompts, decoded(asked), setting)
    models = as_reference(drafter, verifier)
    taken = set()
    for index, prompt in enumerate(prompts):
        of_models = [rows[str(index), 0, use] for use in ("drafter", "verifier")]
        for strategy in cascades:
            outcome = cascade(strategy, *of_models)
            expected = reference.decode(models, prompt, str(index), 0, strategy, setting)
            got = (outcome.output_ids, outcome.finish_reason, outcome.counts)
            assert got == (expected.output_ids, expected.finish_reason, expected.counts)
            assert outcome.strategy == strategy
            taken.add((strategy, outcome.counts.verifier_calls > 0))
    assert {deferred for strategy, deferred in taken if strategy.alpha == 0.0} == {True}
    assert {deferred for strategy, deferred in taken if strategy.alpha == 1.0} == {False}
    assert len(taken) > len(cascades), "no threshold tells the answers apart"


@pytest.mark.parametrize("name", [CAUSAL[0], CAUSAL[1], SEQ2SEQ[0]])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_real_architectures_equal_the_reference_without_caches(
    name: str, temperature: float
) -> None:
    setting = Setting(3, 9, Sampling(temperature), seed=1, eos_token_ids=(EOS,))
    source = random.Random(0)
    prompts = [[source.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 4, 20)]
    strategies = one_of_each(greedy=temperature == 0)
    outcomes = decode(
        slot_model(name, 2), slot_model(name, 1), prompts, strategies, setting, slots=16
    )
    wrap = reference.seq2seq_model if name in SEQ2SEQ else reference.causal_model
    models = reference.Models(
        wrap(hf_model(name, 2), VOCABULARY), wrap(hf_model(name, 1), VOCABULARY)
    )
    assert_equals_reference(outcomes, models, prompts, setting)


def rows_of(outcomes: Outcomes) -> Outcomes:
    """Without what is measured, and without the loss, which may be NaN."""
    return {
        key: replace(outcome, wall_seconds=0.0, risk=replace(outcome.risk, expected_loss=0.0))
        for key, outcome in outcomes.items()
    }


@pytest.fixture(scope="module")
def rows_of_a_sweep() -> Outcomes:
    return rows_of(_sweep(SWEEP, slots=4, banks=1))


def _sweep(strategies: list[Strategy], slots: int, banks: int) -> Outcomes:
    drafter, verifier = tables(vocabulary=9, seed=3)
    setting = Setting(3, 10, FULL, seed=2, repeats=2, eos_token_ids=(0,))
    prompts = [[token] for token in range(1, 6)]
    return decode(
        TableModel(drafter), TableModel(verifier), prompts, strategies, setting, slots, banks
    )


@pytest.mark.parametrize(("slots", "banks"), [(1, 1), (4, 3), (32, 1)])
def test_rows_do_not_depend_on_slots_and_banks(
    rows_of_a_sweep: Outcomes, slots: int, banks: int
) -> None:
    assert rows_of(_sweep(SWEEP, slots, banks)) == rows_of_a_sweep


def test_a_strategy_alone_gives_the_rows_it_gives_among_others(rows_of_a_sweep: Outcomes) -> None:
    assert len({row.output_ids for row in rows_of_a_sweep.values()}) > 50, (
        "the strategies all agree"
    )
    for strategy in SWEEP:
        alone = rows_of(_sweep([strategy], slots=4, banks=1))
        assert len(alone) == 10
        for key, row in alone.items():
            assert row == rows_of_a_sweep[key], key


def test_the_order_of_the_strategies_does_not_matter(rows_of_a_sweep: Outcomes) -> None:
    assert rows_of(_sweep(SWEEP[::-1], slots=4, banks=1)) == rows_of_a_sweep


@pytest.mark.parametrize("narrow", [True, False], ids=["narrow", "all"])
def test_neither_order_of_the_whole_table_matters(narrow: bool) -> None:
    """Pairs of a lane are rejected at falling positions where the laxer strategies stand first."""
    table = [s for s in AT_ANY_TEMPERATURE if target_of(s).is_narrow or not narrow]
    rows = rows_of(_sweep(table, slots=4, banks=1))
    assert rows_of(_sweep(table[::-1], slots=4, banks=1)) == rows
    mixed = random.Random(0).sample(table, len(table))
    assert rows_of(_sweep(mixed, slots=32, banks=1)) == rows


def test_a_target_bonus_makes_the_text_independent_of_the_block_size() -> None:
    """With the verifier's bonus the law of a cascade depends on the block size, and is not the target."""
    drafter, verifier = tables(vocabulary=8, seed=5)
    prompts = [[token] for token in range(8)]

    def texts(bonus: Bonus, block_size: int) -> dict:
        setting = Setting(block_size, 10, FULL, bonus=bonus)
        outcomes = decode(
            TableModel(drafter), TableModel(verifier), prompts, one_of_each(), setting, slots=32
        )
        return {key: outcome.output_ids for key, outcome in outcomes.items()}

    assert texts("target", 1) == texts("target", 4)
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
        ended=torch.zeros(lanes, dtype=torch.bool),
        exhausted=torch.zeros(lanes, dtype=torch.bool),
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
