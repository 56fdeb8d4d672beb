"""Where a text ends and why, and what one lane's end or failure does to the others: nothing.

Planted faults these tests catch: a stop check that looks only at the last token of a round; length
tested before stop; a draft block longer than the budget; a bonus behind an end-of-text token; a
batch that advances at the pace of its slowest lane; NaN logits that become a token; ids of padding
rows that are drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipeline.models.interface import Ints, LanguageModel, ModelBank, SlotContent
from pipeline.models.toy import TableModel
from pipeline.protocol.accounting import Count
from pipeline.records import Bonus, Outcome, Sampling, Setting, Strategy
from tests import reference
from tests.loop import Outcomes, decode, workers
from tests.strategies import is_speculative, one_of_each
from tests.tiny import CAUSAL, SEQ2SEQ, VOCABULARY, hf_model, slot_model

STRATEGIES = one_of_each()
SPECULATIVE = [strategy for strategy in STRATEGIES if is_speculative(strategy)]
GREEDY, FULL = Sampling(0.0), Sampling(1.0)


def chain(vocabulary: int = 14) -> TableModel:
    """Counts upward: behind token t comes t + 1, with hardly a doubt."""
    return TableModel(20.0 * torch.eye(vocabulary).roll(1, dims=1))


def random_table(vocabulary: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(vocabulary, vocabulary, generator=generator)


def all_of(
    strategies: Sequence[Strategy],
    setting: Setting,
    drafter: LanguageModel,
    verifier: LanguageModel,
) -> list[Outcome]:
    """The outcomes of every strategy on the prompt [0]."""
    outcomes = list(decode(drafter, verifier, [[0]], strategies, setting).values())
    assert len(outcomes) == len(strategies)
    return outcomes


# --- the end of a text ------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", [(4,), (9, 4), (4, 9)], ids=str)
@pytest.mark.parametrize("bonus", ["verifier", "target"])
@pytest.mark.parametrize("block_size", range(1, 9))
def test_a_text_ends_at_an_end_token_inside_a_block(
    block_size: int, eos: tuple[int, ...], bonus: Bonus
) -> None:
    strategies = one_of_each(greedy=True)
    setting = Setting(block_size, 10, GREEDY, bonus=bonus)
    for outcome in all_of(strategies, setting, chain(), chain()):
        assert outcome.output_ids == tuple(range(1, 11)), "the chain does not pass the end token"
    ending = replace(setting, eos_token_ids=eos)
    for outcome in all_of(strategies, ending, chain(), chain()):
        assert outcome.output_ids == (1, 2, 3, 4), outcome.strategy.label
        assert outcome.finish_reason == "stop"


@pytest.mark.parametrize("name", [CAUSAL[0], SEQ2SEQ[0]])
def test_a_real_models_text_ends_at_the_token_declared_its_end(name: str) -> None:
    prompts = [[7, 8, 9], [20], [33, 5, 12, 40, 41, 6]]
    drafter, verifier = slot_model(name, 2), slot_model(name, 1)
    spec_decode = [Strategy("spec_decode")]
    free = decode(drafter, verifier, prompts, spec_decode, Setting(3, 10, GREEDY))
    for block_size in (1, 2, 4, 8):
        for index, prompt in enumerate(prompts):
            outcome = free[str(index), 0, "spec_decode"]
            eos = outcome.output_ids[3]
            expected = outcome.output_ids[: outcome.output_ids.index(eos) + 1]
            setting = Setting(block_size, 10, GREEDY, eos_token_ids=(eos, VOCABULARY))
            (got,) = decode(drafter, verifier, [prompt], spec_decode, setting).values()
            assert got.output_ids == expected
            assert got.finish_reason == "stop"


@pytest.mark.parametrize(
    ("eos", "ids", "reason"),
    [
        ((2,), (1, 2), "stop"),
        ((5,), (1, 2, 3), "length"),
        ((3,), (1, 2, 3), "stop"),  # the last token allowed is the end: a stop
        ((), (1, 2, 3), "length"),
    ],
    ids=str,
)
def test_stop_and_length_in_the_same_round(
    eos: tuple[int, ...], ids: tuple[int, ...], reason: str
) -> None:
    """Five tokens would be accepted, and three are left."""
    setting = Setting(5, 3, GREEDY, eos_token_ids=eos)
    for outcome in all_of(SPECULATIVE, setting, chain(), chain()):
        assert (outcome.output_ids, outcome.finish_reason) == (ids, reason), outcome.strategy.label
        assert outcome.counts.drafted == outcome.counts.accepted == len(ids)
        assert outcome.counts.rounds == 1


@pytest.mark.parametrize("sampling", [GREEDY, FULL], ids=["greedy", "sampled"])
@pytest.mark.parametrize("bonus", ["verifier", "target"])
def test_a_budget_of_one_gives_one_token_and_drafts_no_more(
    sampling: Sampling, bonus: Bonus
) -> None:
    setting = Setting(8, 1, sampling, bonus=bonus)
    drafter, verifier = (TableModel(random_table(6, seed)) for seed in (1, 2))
    for outcome in all_of(STRATEGIES, setting, drafter, verifier):
        assert len(outcome.output_ids) == 1
        assert outcome.finish_reason == "length"
        counts = outcome.counts
        assert counts.drafter_calls == (outcome.strategy.use != "verifier")
        assert counts.verifier_calls <= 1
        assert counts.verifier_tokens <= 1
        assert counts.bonus_tokens == 0
        assert counts.drafted == is_speculative(outcome.strategy)


def test_no_token_is_drafted_beyond_the_budget_of_the_longest_lane() -> None:
    setting = Setting(8, 3, GREEDY)
    drafting, _ = workers(chain(), chain(), [[0], [5]], [Strategy("spec_decode")], setting)
    bank = drafting.banks[0]
    assert drafting.seat(bank)
    assert drafting.draft(bank).tokens.shape == (2, 3)


def test_the_block_behind_the_last_full_one_is_no_longer_than_what_is_left() -> None:
    spec_decode = [Strategy("spec_decode")]
    (outcome,) = all_of(spec_decode, Setting(4, 11, GREEDY), chain(), chain())
    # 4 + bonus, 4 + bonus, then one token is left.
    assert outcome.output_ids == tuple(range(1, 12))
    assert outcome.counts.accepted_histogram == (0, 1, 0, 0, 2)
    assert outcome.counts.drafted == 9
    assert outcome.counts.bonus_tokens == 2
    assert outcome.counts.verifier_tokens == 5 + 5 + 1


# --- ragged batches ---------------------------------------------------------------------------------


def accepted_by_round(
    name: str, prompts: Sequence[Sequence[int]], ids: Sequence[str], slots: int
) -> tuple[dict[str, list[int]], dict[str, tuple[int, ...]], int]:
    """For each example: tokens accepted in each round, and its text; and the verifier's rounds."""
    setting = Setting(4, 16, Sampling(0.7), seed=5, eos_token_ids=(VOCABULARY,))
    spec_decode = [Strategy("spec_decode")]
    models = slot_model(name, 2), slot_model(name, 1)
    drafting, verifying = workers(*models, prompts, spec_decode, setting, slots, ids=ids)
    bank = drafting.banks[0]
    accepted: dict[str, list[int]] = {example: [] for example in ids}
    texts, rounds = {}, 0
    while drafting.seat(bank):
        request = drafting.draft(bank)
        reply = verifying.verify(request)
        for row, counts in zip(request.pair_rows, reply.counts, strict=True):
            task = bank.seats.tasks[row]
            assert task is not None
            accepted[task.example.example_id].append(int(counts[Count.ACCEPTED]))
        for finished in drafting.apply(bank, reply):
            texts[finished.outcome.example_id] = finished.outcome.output_ids
        rounds += 1
    return accepted, texts, rounds


@pytest.mark.parametrize("name", [CAUSAL[0], CAUSAL[1], SEQ2SEQ[0]])
def test_a_ragged_batch_goes_at_the_pace_of_each_of_its_rows(name: str) -> None:
    prompts = [[3 + (7 * i) % 50 for i in range(length)] for length in (4, 9, 17, 30)]
    ids = ["a", "b", "c", "d"]
    together, texts, rounds = accepted_by_round(name, prompts, ids, slots=4)
    alone = [
        accepted_by_round(name, [prompt], [example], slots=1)
        for prompt, example in zip(prompts, ids, strict=True)
    ]
    for example, (accepted, text, _) in zip(ids, alone, strict=True):
        assert accepted[example] == together[example]
        assert text[example] == texts[example]
    assert rounds == max(len(accepted) for accepted in together.values())
    assert len({len(accepted) for accepted in together.values()}) > 1, "all rows are equally long"


# --- broken models ----------------------------------------------------------------------------------

MARKED, BROKEN_AT = 3, 3


class Breaking(LanguageModel):
    """A model whose logits for output token `BROKEN_AT` are bad in lanes whose prompt ends in `MARKED`."""

    def __init__(self, inner: LanguageModel, bad: float) -> None:
        self.inner, self.bad = inner, bad
        self.device, self.vocabulary = inner.device, inner.vocabulary
        self.effort = inner.effort

    def bank(self, slots: int) -> ModelBank:
        bank = self.inner.bank(slots)
        opened, fed = bank.open, bank.feed
        marked = torch.zeros(slots, dtype=torch.bool)

        def open_and_mark(contents: Sequence[SlotContent]) -> None:
            opened(contents)
            for content in contents:
                marked[content.slot] = content.prompt_ids[-1] == MARKED

        def feed_and_break(tokens: Tensor, starts: Ints, keep: int) -> Tensor:
            offsets = torch.from_numpy(starts)[:, None] + torch.arange(tokens.shape[1])
            broken = (offsets[:, -keep:] == BROKEN_AT - 1) & marked[: len(tokens), None]
            return fed(tokens, starts, keep).masked_fill(broken[..., None], self.bad)

        bank.open, bank.feed = open_and_mark, feed_and_break
        return bank


PROMPTS = [[2], [MARKED], [4], [0]]
bad_values = pytest.mark.parametrize("bad", [torch.nan, -torch.inf], ids=str)


def decode_pair(
    drafter: LanguageModel,
    verifier: LanguageModel,
    sampling: Sampling,
    bonus: Bonus,
    block_size: int = 3,
) -> Outcomes:
    setting = Setting(block_size, 8, sampling, bonus=bonus, seed=3)
    return decode(drafter, verifier, PROMPTS, STRATEGIES, setting)


def ids_and_counts(outcome: Outcome) -> tuple:
    return outcome.output_ids, outcome.finish_reason, outcome.counts, outcome.error


def assert_failed(outcome: Outcome, clean: Outcome, model: str) -> None:
    """It ended with a named error and kept what it had; its numbers still add up."""
    assert outcome.finish_reason == "error"
    assert outcome.error is not None
    assert outcome.error.code == f"{model}_nan"
    assert outcome.output_ids == clean.output_ids[:BROKEN_AT]
    counts = outcome.counts
    if counts.rounds:
        emitted = counts.accepted + counts.rejected + counts.bonus_tokens
        assert emitted == len(outcome.output_ids)
        assert counts.drafted >= counts.accepted
        assert sum(counts.accepted_histogram) == counts.rounds


@bad_values
@pytest.mark.parametrize("sampling", [GREEDY, FULL], ids=["greedy", "sampled"])
@pytest.mark.parametrize("bonus", ["verifier", "target"])
def test_a_broken_verifier_fails_the_strategies_that_needed_it_there_and_no_other_row(
    bad: float, sampling: Sampling, bonus: Bonus
) -> None:
    drafter, verifier = TableModel(random_table(6, 1)), TableModel(random_table(6, 2))
    clean = decode_pair(drafter, verifier, sampling, bonus)
    got = decode_pair(drafter, Breaking(verifier, bad), sampling, bonus)
    assert got.keys() == clean.keys()
    failed = set()
    for (example, repeat, label), outcome in got.items():
        expected = clean[example, repeat, label]
        if example == "1" and outcome.error:
            assert_failed(outcome, expected, "verifier")
            failed.add(outcome.strategy.use)
        else:
            assert ids_and_counts(outcome) == ids_and_counts(expected)
    # These look at the drafter alone and may have kept its token there.
    may_pass = {"drafter", "token_cascade.chow", "token_cascade.entropy"}
    may_pass |= {"spec_cascade.chow", "spec_cascade.chow_log"}
    assert failed >= {strategy.use for strategy in STRATEGIES} - may_pass
    assert "drafter" not in failed


@bad_values
@pytest.mark.parametrize("sampling", [GREEDY, FULL], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("bonus", "block_size"), [("target", 3), ("verifier", 5)])
def test_a_broken_drafter_fails_all_but_the_verifier_and_no_other_row(
    bad: float, sampling: Sampling, bonus: Bonus, block_size: int
) -> None:
    """Where no bonus of the verifier can stand in for the drafter."""
    drafter, verifier = TableModel(random_table(6, 1)), TableModel(random_table(6, 2))
    clean = decode_pair(drafter, verifier, sampling, bonus, block_size)
    got = decode_pair(Breaking(drafter, bad), verifier, sampling, bonus, block_size)
    assert got.keys() == clean.keys()
    for (example, repeat, label), outcome in got.items():
        expected = clean[example, repeat, label]
        if example == "1" and outcome.strategy.use != "verifier":
            assert_failed(outcome, expected, "drafter")
        else:
            assert ids_and_counts(outcome) == ids_and_counts(expected)


def test_a_bonus_of_the_verifier_passes_over_a_place_where_the_drafter_is_broken() -> None:
    setting = Setting(BROKEN_AT, 10, GREEDY)
    prompts = [[MARKED]]
    clean = decode(chain(20), chain(20), prompts, [Strategy("spec_decode")], setting)
    drafter = Breaking(chain(20), torch.nan)
    got = decode(drafter, chain(20), prompts, [Strategy("spec_decode")], setting)
    assert [o.output_ids for o in got.values()] == [o.output_ids for o in clean.values()]
    assert [o.error for o in got.values()] == [None]


def test_a_custom_target_that_is_no_distribution_ends_its_own_row_alone() -> None:
    broken = Strategy("custom", target="tests.targets:not_a_distribution")
    drafter, verifier = TableModel(random_table(6, 1)), TableModel(random_table(6, 2))
    setting = Setting(3, 6, FULL, seed=3)
    clean = decode(drafter, verifier, PROMPTS, STRATEGIES, setting)
    got = decode(drafter, verifier, PROMPTS, [broken, *STRATEGIES], setting)
    for key, outcome in got.items():
        if outcome.strategy == broken:
            assert outcome.error is not None
            assert outcome.error.code == "target_invalid"
            assert outcome.output_ids == ()
        else:
            assert ids_and_counts(outcome) == ids_and_counts(clean[key])


# --- vocabularies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [CAUSAL[0], SEQ2SEQ[0]])
@pytest.mark.parametrize("widened", ["drafter", "verifier"])
def test_ids_beyond_the_shared_vocabulary_are_cut_before_any_probability(
    name: str, widened: str
) -> None:
    """Padding rows that would win: the reference cuts the logits first and must agree."""
    shared = 40
    hf = {"drafter": hf_model(name, 2), "verifier": hf_model(name, 1)}
    hf[widened].resize_token_embeddings(VOCABULARY + 7, mean_resizing=False)
    with torch.no_grad():
        hf[widened].get_output_embeddings().weight[shared:] *= 2
    wrapped = slot_model(name, 2, shared), slot_model(name, 1, shared)
    for ours, model in zip(wrapped, hf.values(), strict=True):
        ours.model.resize_token_embeddings(model.config.vocab_size, mean_resizing=False)
        ours.model.load_state_dict(model.state_dict())
    setting = Setting(3, 7, FULL, seed=1)
    prompts = [[5, 6], [9, 30, 2, 8]]
    wrap = reference.seq2seq_model if name in SEQ2SEQ else reference.causal_model
    models = reference.Models(*(wrap(model, shared) for model in hf.values()))
    uncut = wrap(hf[widened], VOCABULARY + 7)((5, 6), ())
    assert reference.softmax(uncut)[shared:].sum() > 0.2, "the padding rows do not tempt anyone"
    for (example, repeat, _), outcome in decode(*wrapped, prompts, STRATEGIES, setting).items():
        prompt = prompts[int(example)]
        expected = reference.decode(models, prompt, example, repeat, outcome.strategy, setting)
        assert outcome.output_ids == expected.output_ids
        assert max(outcome.output_ids) < shared
