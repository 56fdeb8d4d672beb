"""Slot caches give what the model gives without any cache, whatever a slot went through before.

The measure is always the same weights in `transformers`, run over the whole text without a cache.

Planted faults these tests catch: the query offset of T5's relative bias taken as zero; the cross
cache cropped or rolled back with the decoder's; one position vector for all lanes; the last drafted
token never fed to the drafter; a rewind that is off by one; stale columns before the mask; a mask
without the sliding window; growth that drops or misplaces columns; another slot's keys.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.models.causal import CausalModel
from pipeline.models.determinism import is_batch_invariant
from pipeline.models.interface import LanguageModel, ModelBank, SlotContent
from pipeline.models.seq2seq import Seq2SeqBank, Seq2SeqModel
from pipeline.protocol.accounting import Count
from pipeline.protocol.blocks import Sum, Thought
from pipeline.records import Sampling, Setting, Strategy
from pipeline.workers.wire import VerifyReply, VerifyRequest
from tests.loop import workers
from tests.tiny import CAUSAL, EOS, PAD, SEQ2SEQ, VOCABULARY, hf_model, slot_model

every_model = pytest.mark.parametrize("name", [*CAUSAL, *SEQ2SEQ])
every_t5 = pytest.mark.parametrize("name", SEQ2SEQ)
bitwise = pytest.mark.skipif(
    not is_batch_invariant(), reason="this CPU's linear algebra depends on the number of rows"
)

Ids = Sequence[int]


def text(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(length)]


def exact_hf_model(name: str) -> PreTrainedModel:
    return hf_model(name).double()


def uncached(model: PreTrainedModel, prompt: Ids, output: Ids) -> Tensor:
    """Logits for the output tokens 0 to len(output), (len(output) + 1, V), without a cache."""
    with torch.inference_mode():
        if model.config.is_encoder_decoder:
            decoder = torch.tensor([[PAD, *output]])
            source = torch.tensor([list(prompt)])
            mask = torch.ones_like(source)  # T5 would mask a prompt's own pad tokens
            return model(
                input_ids=source, attention_mask=mask, decoder_input_ids=decoder, use_cache=False
            ).logits[0]
        ids = torch.tensor([[*prompt, *output]])
        return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]


def exact_slot_model(name: str) -> LanguageModel:
    """In float64, so that a difference is a fault and not rounding."""
    wrapped = slot_model(name)
    assert isinstance(wrapped, CausalModel | Seq2SeqModel)
    wrapped.model.double()
    return wrapped


def opened(name: str, *lanes: tuple[Ids, Ids], slots: int | None = None) -> ModelBank:
    """A bank in float64 whose first slots hold (prompt, output) lanes."""
    return filled(exact_slot_model(name), lanes, slots)


def opened_float32(name: str, *lanes: tuple[Ids, Ids]) -> ModelBank:
    """A bank in the dtype of real runs, for what must be equal to the last bit."""
    return filled(slot_model(name), lanes)


def filled(
    model: LanguageModel, lanes: Sequence[tuple[Ids, Ids]], slots: int | None = None
) -> ModelBank:
    bank = model.bank(slots or len(lanes))
    bank.open([SlotContent(slot, prompt, output) for slot, (prompt, output) in enumerate(lanes)])
    return bank


def feed(bank: ModelBank, rows: Sequence[Ids], starts: Ids, keep: int | None = None) -> Tensor:
    """Feed the tokens of each row at offsets from its start."""
    tokens = torch.tensor([list(row) for row in rows])
    return bank.feed(tokens, np.array(starts), keep or tokens.shape[1])


def assert_close(got: Tensor, expected: Tensor, where: object = "") -> None:
    expected = expected.float()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5, msg=lambda m: f"{where}: {m}")


# --- positions, relative bias, sources --------------------------------------------------------------


@every_model
def test_tokens_fed_at_once_one_by_one_and_behind_a_rollback_agree(name: str) -> None:
    """The relative bias of T5, and the positions of all others, come from the cache column."""
    prompt, output, wrong = text(7, 0), text(5, 1), text(3, 2)
    expected = uncached(exact_hf_model(name), prompt, output)
    fed = [0, *output]  # offset -1 is the prefix's own last token, whatever is given

    at_once = feed(opened(name, (prompt, [])), [fed], [-1])[0]
    assert_close(at_once, expected, "at once")

    bank = opened(name, (prompt, []))
    steps = [feed(bank, [[token]], [offset - 1])[0] for offset, token in enumerate(fed)]
    assert_close(torch.cat(steps), expected, "one by one")

    bank = opened(name, (prompt, []))
    first = feed(bank, [[0, output[0], *wrong[:2]]], [-1])[0]
    assert_close(first[:2], expected[:2], "before the rollback")
    behind = feed(bank, [fed[2:]], [1])[0]
    assert_close(behind, expected[2:], "behind the rollback")


@every_model
@pytest.mark.parametrize("short", [[5], [PAD], [EOS], [EOS, PAD]])
def test_a_short_prompt_beside_a_long_one_gives_what_it_gives_alone(name: str, short: Ids) -> None:
    """One position for each lane, and padding that is told by place, not by token id."""
    lanes = [(text(20, 3), []), (short, []), (text(33, 4), [])]
    together = feed(opened(name, *lanes), [[0, 9, 8]] * 3, [-1] * 3)
    model = exact_hf_model(name)
    for row, (prompt, _) in enumerate(lanes):
        assert_close(together[row], uncached(model, prompt, [9, 8]), f"{row=}")


@every_t5
def test_the_encoded_prompt_stays_whole_over_ten_rejections(name: str) -> None:
    prompt, output = text(12, 5), text(10, 6)
    bank = opened(name, (prompt, []), (text(5, 7), []))
    assert isinstance(bank, Seq2SeqBank)
    model = exact_hf_model(name)

    def encoded() -> list[Tensor]:
        feed(bank, [[0]] * 2, [-1] * 2)
        return [tensor.clone() for layer in bank._cross for tensor in (layer.keys, layer.values)]

    before = encoded()
    assert before[0][0, :, :12].abs().amin(dim=-1).min() > 0
    for length in range(10):
        drafts = text(4, 100 + length)
        last = output[length - 1] if length else 0
        logits = feed(bank, [[last, *drafts], [0] * 5], [length - 1, -1])[0]
        expected = uncached(model, prompt, [*output[:length], *drafts])[length:]
        assert_close(logits, expected, f"{length} tokens kept")
    for kept, now in zip(before, encoded(), strict=True):
        assert torch.equal(kept, now)


# --- what drafting and verifying do to a cache ------------------------------------------------------


def accepted_in_turn(turn: int, lane: int, drafted: int) -> int:
    """None, some or all, in turn; the lanes are out of step, so they become ragged."""
    return (0, drafted // 2, drafted)[(turn + lane) % 3]


@every_model
def test_the_verifiers_passes_equal_the_uncached_model_over_twelve_ragged_rounds(name: str) -> None:
    prompts = [text(length, length) for length in (1, 2, 9, 31)]
    outputs: list[list[int]] = [[] for _ in prompts]
    bank, model = opened(name, *((prompt, []) for prompt in prompts), slots=6), exact_hf_model(name)
    ragged = False
    for turn in range(12):
        drafts = [text(4, 50 * turn + lane) for lane in range(4)]
        fed = [[(output or [0])[-1], *draft] for output, draft in zip(outputs, drafts, strict=True)]
        logits = feed(bank, fed, [len(output) - 1 for output in outputs])
        for lane, (output, draft) in enumerate(zip(outputs, drafts, strict=True)):
            expected = uncached(model, prompts[lane], [*output, *draft])[len(output) :]
            assert_close(logits[lane], expected, f"{turn=} {lane=}")
            accepted = accepted_in_turn(turn, lane, 4)
            output += [*draft[:accepted], text(1, 7 * turn + lane)[0]]
        ragged |= len({len(output) for output in outputs}) > 1
    assert ragged
    assert max(map(len, outputs)) > 32, "the cache never grew"


def forced_reply(request: VerifyRequest, turn: int) -> VerifyReply:
    """Accept none, some or all of each lane's draft, and put a token of our own behind it."""
    lanes, width = request.tokens.shape
    tokens = np.zeros((lanes, width + 1), dtype=np.int64)
    num_tokens = np.zeros(lanes, dtype=np.int64)
    for lane in range(lanes):
        accepted = accepted_in_turn(turn, lane, int(request.num_drafted[lane]))
        tokens[lane, :accepted] = request.tokens[lane, :accepted]
        tokens[lane, accepted] = (7 * turn + lane) % 50 + 3
        num_tokens[lane] = accepted + 1
    return VerifyReply(
        round=request.round,
        tokens=tokens,
        num_tokens=num_tokens,
        counts=np.zeros((lanes, len(Count)), dtype=np.int64),
        sums=np.zeros((lanes, len(Sum))),
        failed=np.zeros_like(num_tokens),
        origins=np.zeros_like(tokens),
        deferred=np.zeros(tokens.shape, dtype=bool),
        thoughts=np.zeros((lanes, 0, len(Thought)), dtype=np.float32),
    )


@every_model
def test_the_drafters_logits_equal_the_uncached_model_after_none_some_and_all_accepted(
    name: str,
) -> None:
    """After a block taken whole the drafter has never seen its last drafted token."""
    setting = Setting(4, 80, Sampling(1.0), eos_token_ids=(VOCABULARY,))
    prompts = [text(length, length) for length in (1, 2, 9, 31)]
    ours, model = exact_slot_model(name), exact_hf_model(name)
    drafting, _ = workers(ours, ours, prompts, [Strategy("spec_decode")], setting)
    bank = drafting.banks[0]
    for turn in range(12):
        assert drafting.seat(bank)
        request = drafting.draft(bank)
        for slot in range(len(prompts)):
            assert bank.seats.tasks[slot] is not None
            written, drafts = bank.seats.output_ids(slot).tolist(), request.tokens[slot].tolist()
            whole = uncached(model, prompts[slot], [*written, *drafts])
            expected = whole[len(written) : -1]
            assert_close(torch.from_numpy(request.draft.logits[slot]), expected, (turn, slot))
        drafting.apply(bank, forced_reply(request, turn))


# --- slots ------------------------------------------------------------------------------------------


@every_model
def test_a_lane_rebuilt_from_its_tokens_goes_on_like_one_that_was_stepped(name: str) -> None:
    prompt, output = text(9, 1), text(30, 2)
    model = exact_hf_model(name)
    for length in (1, 2, 7, 22, 30):
        rebuilt = opened(name, (text(3, 3), text(5, 4)), (prompt, output[:length]))
        fed = [[1, 2], output[length - 2 : length] if length > 1 else [0, output[0]]]
        got = feed(rebuilt, fed, [3, length - 2])[1]
        assert_close(got, uncached(model, prompt, output[:length])[-2:], f"{length=}")


@bitwise
@every_model
def test_a_lane_rebuilt_from_its_tokens_is_bitwise_the_one_that_was_stepped(name: str) -> None:
    prompt, output = text(9, 1), text(40, 2)
    stepped = opened_float32(name, (prompt, []))
    feed(stepped, [[0, output[0]]], [-1])
    for length in range(2, 40):
        fed = output[length - 2 : length]
        got = feed(stepped, [fed], [length - 2], keep=1)
        if length % 4 == 3:
            rebuilt = opened_float32(name, (text(3, 3), text(5, 4)), (prompt, output[:length]))
            assert torch.equal(feed(rebuilt, [[1, 2], fed], [3, length - 2], keep=1)[1], got[0]), (
                length
            )


@bitwise
@every_model
def test_a_prompt_is_encoded_bitwise_the_same_beside_any_other(name: str) -> None:
    for length in (1, 7, 12, 20, 31):
        lane = (text(length, 1), [])
        alone = feed(opened_float32(name, lane), [[0, 3, 4]], [-1])[0]
        for other in (3, 16, 23, 30, 50):
            together = opened_float32(name, (text(other, 2), text(other, 3)), lane)
            got = feed(together, [[5, 6, 7], [0, 3, 4]], [other - 1, -1])[1]
            assert torch.equal(got, alone), f"{length=} {other=}"


@every_model
def test_nothing_of_a_slots_former_lane_is_left(name: str) -> None:
    lanes = [(text(6, 1), text(2, 2)), (text(4, 3), [])]
    used = opened(name, (text(40, 4), text(30, 5)), (text(39, 6), text(31, 7)))
    feed(used, [text(5, 8), text(5, 9)], [29, 30])
    used.open([SlotContent(slot, *lane) for slot, lane in enumerate(lanes)])
    fed, starts = [[lanes[0][1][-1], 3, 4], [0, 5, 6]], [1, -1]
    got = feed(used, fed, starts)
    model = exact_hf_model(name)
    assert_close(got[0], uncached(model, lanes[0][0], [*lanes[0][1], 3, 4])[2:])
    assert_close(got[1], uncached(model, lanes[1][0], [5, 6]))


@every_model
def test_opening_a_slot_leaves_its_neighbours_alone(name: str) -> None:
    """Also where the newcomer is longer than all that the bank held: the caches grow."""
    prompt, output = text(6, 1), text(9, 2)
    bank = opened(name, (prompt, output[:8]), (text(3, 3), []))
    feed(bank, [output[7:8], [0]], [7, -1])
    bank.open([SlotContent(1, text(70, 4), text(70, 5))])
    got = feed(bank, [output[8:9], text(70, 5)[-1:]], [8, 69])
    model = exact_hf_model(name)
    assert_close(got[0], uncached(model, prompt, output)[-1:])
    assert_close(got[1], uncached(model, text(70, 4), text(70, 5))[-1:])


@bitwise
@every_model
@pytest.mark.parametrize("width", [1, 2, 6])
def test_logits_are_bitwise_the_same_in_any_slot_beside_any_lanes(name: str, width: int) -> None:
    lane, fed = (text(11, 1), text(6, 2)), text(width, 3)

    def logits(slots: int, slot: int) -> Tensor:
        others = [(text(3 + 5 * s, s), text(6, 10 + s)) for s in range(slots)]
        bank = opened_float32(name, *others[:slot], lane, *others[slot + 1 :])
        rows = [text(width, 20 + s) for s in range(slots)]
        rows[slot] = fed
        return feed(bank, rows, [5] * slots)[slot]

    alone = logits(1, 0)
    for slots, slot in ((2, 1), (3, 0), (5, 4), (8, 3)):
        assert torch.equal(logits(slots, slot), alone), f"{slots=} {slot=}"


@bitwise
@every_model
def test_logits_are_bitwise_the_same_for_any_number_of_tokens_fed_at_once(name: str) -> None:
    """A drafter feeds one token where a verifier feeds a block."""
    prompt, output = text(9, 1), text(12, 2)
    at_once = feed(opened_float32(name, (prompt, [])), [[0, *output]], [-1])[0]
    for width in (1, 2, 3, 5):
        bank = opened_float32(name, (prompt, []))
        fed = [0, *output][: 13 // width * width]
        parts = [
            feed(bank, [fed[start : start + width]], [start - 1])[0]
            for start in range(0, len(fed), width)
        ]
        assert torch.equal(torch.cat(parts), at_once[: len(fed)]), f"{width=}"


# --- vocabularies -----------------------------------------------------------------------------------


@every_model
def test_logits_are_cut_to_the_shared_vocabulary(name: str) -> None:
    bank = slot_model(name, vocabulary=50).bank(1)
    bank.open([SlotContent(0, text(6, 1))])
    got = feed(bank, [[0, 3, 4]], [-1])[0]
    assert got.shape == (3, 50)
    expected = uncached(exact_hf_model(name), text(6, 1), [3, 4])[:, :50].float()
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
