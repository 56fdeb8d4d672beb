"""A slot filled from other slots of its bank gives what a bank that never held anything gives.

The measure is a fresh bank of the same weights that holds the one lane: to the last bit in the dtype
of real runs, and up to 1e-5 in float64, where a difference is a fault and not rounding.

Planted faults these tests catch: columns behind a replaced token that still count as held; what a
slot held before that still counts behind what it took over; a match that goes on behind the first
token that differs; one column too many, or too few, taken over; slots that read each other after the
first was overwritten; T5 columns or encoded prompts shared between prompts that differ; a prompt's
mask left behind; a slot's former prompt still counted as its own, or one as long taken for it; a prompt
encoded again for each lane; the rest of a lane computed where it does not stand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import Tensor

from pipeline.models.interface import Effort, LanguageModel, ModelBank, SlotContent
from tests.models.test_slots import (
    Ids,
    assert_close,
    bitwise,
    every_model,
    every_t5,
    exact_slot_model,
    feed,
    filled,
    text,
)
from tests.tiny import CAUSAL, SEQ2SEQ, VOCABULARY, slot_model

Lane = tuple[Ids, Ids]
"""A prompt and what was written behind it."""

every_causal = pytest.mark.parametrize("name", CAUSAL)


def assert_bitwise(got: Tensor, expected: Tensor, where: object = "") -> None:
    assert torch.equal(got, expected), where


@dataclass(frozen=True)
class Measure:
    """Which models are compared, and how closely."""

    model: Callable[[str], LanguageModel]
    assert_same: Callable[[Tensor, Tensor, object], None]

    def assert_fresh(
        self, got: Tensor, name: str, lanes: Sequence[Lane], rows: Sequence[Ids], where: object
    ) -> None:
        """`got` (A, Q, V) is what a fresh bank says when each row ends its lane's text."""
        bank = filled(self.model(name), lanes)
        starts = [len(output) - len(row) for (_, output), row in zip(lanes, rows, strict=True)]
        expected = feed(bank, rows, starts)
        for lane in range(len(lanes)):
            self.assert_same(got[lane], expected[lane], (where, lane))


every_measure = pytest.mark.parametrize(
    "measure",
    [
        pytest.param(Measure(cache(slot_model), assert_bitwise), id="bitwise", marks=bitwise),
        pytest.param(Measure(cache(exact_slot_model), assert_close), id="float64"),
    ],
)


def prefix_length(name: str, prompt: Ids) -> int:
    return 1 if name in SEQ2SEQ else len(prompt)


def put(bank: ModelBank, *lanes: tuple[int, Lane]) -> Effort:
    """Open lanes in slots, all in one call; what that cost."""
    before = Effort(**vars(bank.effort))
    bank.open([SlotContent(slot, prompt, output) for slot, (prompt, output) in lanes])
    return Effort(
        *(now - then for now, then in zip(_amounts(bank.effort), _amounts(before), strict=True))
    )


def _amounts(effort: Effort) -> tuple[int, int, int]:
    return effort.stepped, effort.prefilled, effort.reused


def go_on(bank: ModelBank, lanes: Sequence[Lane]) -> Tensor:
    """Feed the last token of the lanes in the first slots again: logits of the next, (A, 1, V)."""
    return feed(bank, last_tokens(lanes), [len(output) - 1 for _, output in lanes])


def last_tokens(lanes: Sequence[Lane]) -> list[Ids]:
    return [[[0, *output][-1]] for _, output in lanes]


def assert_all_fresh(
    measure: Measure, name: str, bank: ModelBank, lanes: Sequence[Lane], where: object = ""
) -> None:
    measure.assert_fresh(go_on(bank, lanes), name, lanes, last_tokens(lanes), where)


# --- one source -------------------------------------------------------------------------------------


@every_measure
@every_model
def test_a_lane_that_another_slot_holds_in_part_goes_on_as_in_a_fresh_bank(
    measure: Measure, name: str
) -> None:
    prompt, output = text(9, 0), text(12, 1)
    for shared in (0, 1, 5, 12):
        for behind in (0, 1, 4, 20):
            bank = filled(measure.model(name), [(prompt, output[:6])], slots=3)
            feed(bank, [output[5:]], [5])  # some of it prefilled, some stepped
            other = text(behind, 2)
            if other and shared < 12:
                other[0] = (output[shared] + 1) % VOCABULARY
            lanes = [(prompt, output), (prompt, [*output[:shared], *other])]
            cost = put(bank, (1, lanes[1]))
            assert cost.reused == prefix_length(name, prompt) + shared
            # The token that a lane ends with is fed again, so it need not be there.
            assert (cost.prefilled > 0) == (behind > 1), "what is held is computed again"
            assert_all_fresh(measure, name, bank, lanes, (shared, behind))


@every_measure
@every_model
def test_what_stands_behind_a_replaced_token_is_not_held(measure: Measure, name: str) -> None:
    """A lane that goes on with the very tokens that were drafted behind a rejected one."""
    prompt, output = text(7, 0), text(6, 1)
    rejected, replaced, drafts = 11, 12, text(3, 2)
    bank = filled(measure.model(name), [(prompt, output)], slots=3)
    feed(bank, [[output[-1], rejected, *drafts]], [5])
    feed(bank, [[replaced]], [6])
    lanes = [(prompt, [*output, replaced]), (prompt, [*output, replaced, *drafts, 9])]
    cost = put(bank, (1, lanes[1]))
    assert cost.reused == prefix_length(name, prompt) + 7
    assert_all_fresh(measure, name, bank, lanes)


@every_measure
@every_model
def test_a_lane_takes_over_drafts_that_its_source_has_lost(measure: Measure, name: str) -> None:
    """The drafted block is what a lane that accepted more of it shares with its source."""
    prompt, output, drafts = text(7, 0), text(6, 1), text(4, 2)
    bank = filled(measure.model(name), [(prompt, output)], slots=2)
    feed(bank, [[output[-1], *drafts]], [5])
    lanes = [(prompt, [*output, drafts[0], 5]), (prompt, [*output, *drafts[:3], 6])]
    assert put(bank, (1, lanes[1])).reused == prefix_length(name, prompt) + 9
    assert_all_fresh(measure, name, bank, lanes)


@every_measure
@every_model
def test_a_slot_that_was_overwritten_is_no_source_any_more(measure: Measure, name: str) -> None:
    """Neither where the newcomer is shorter than the former lane, nor behind what it took over."""
    prompt, output = text(7, 0), text(20, 1)
    bank = filled(measure.model(name), [(prompt, output), (prompt, output[:3])], slots=3)
    go_on(bank, [(prompt, output), (prompt, output[:3])])
    newcomer = (text(5, 2), [3, 4])
    put(bank, (0, newcomer))
    go_on(bank, [newcomer, (prompt, output[:3])])
    lanes = [newcomer, (prompt, output[:3]), (prompt, output)]
    assert put(bank, (2, lanes[2])).reused == prefix_length(name, prompt) + 3
    assert_all_fresh(measure, name, bank, lanes)


# --- several slots at once --------------------------------------------------------------------------


@every_measure
@every_model
def test_lanes_move_to_lower_slots(measure: Measure, name: str) -> None:
    lanes = [(text(3 + 4 * slot, slot), text(2 + 5 * slot, 10 + slot)) for slot in range(6)]
    bank = filled(measure.model(name), lanes)
    go_on(bank, lanes)
    moved = [lanes[5], lanes[1], lanes[4]]
    cost = put(bank, (0, lanes[5]), (2, lanes[4]))
    assert cost.prefilled == 0
    assert cost.reused == sum(prefix_length(name, p) + len(o) for p, o in (lanes[5], lanes[4]))
    assert_all_fresh(measure, name, bank, moved)


@every_measure
@every_model
def test_many_lanes_take_over_from_one_that_is_overwritten_in_the_same_call(
    measure: Measure, name: str
) -> None:
    prompt, output = text(9, 0), text(10, 1)
    bank = filled(measure.model(name), [(prompt, output), (text(4, 2), text(3, 3))], slots=6)
    go_on(bank, [(prompt, output), (text(4, 2), text(3, 3))])
    lanes = [
        (text(30, 4), []),
        (text(4, 2), text(3, 3)),
        (prompt, [*output, 7]),
        (prompt, [*output[:4], 8, 9, 10, 11]),
        (prompt, output),
        (prompt, []),
    ]
    cost = put(bank, *((slot, lane) for slot, lane in enumerate(lanes) if slot != 1))
    assert cost.reused == 4 * prefix_length(name, prompt) + 10 + 4 + 10
    assert_all_fresh(measure, name, bank, lanes)


@every_measure
@every_model
def test_slots_exchange_their_lanes_in_one_call(measure: Measure, name: str) -> None:
    lanes = [(text(5 + 3 * slot, slot), text(4 + 5 * slot, 10 + slot)) for slot in range(3)]
    bank = filled(measure.model(name), lanes)
    go_on(bank, lanes)
    turned = [lanes[1], lanes[2], lanes[0]]
    assert put(bank, *enumerate(turned)).prefilled == 0
    assert_all_fresh(measure, name, bank, turned)
    assert put(bank, *enumerate(lanes)).prefilled == 0, "what was taken over is not known"
    assert_all_fresh(measure, name, bank, lanes)


# --- prompts ----------------------------------------------------------------------------------------


@every_measure
@every_causal
def test_prompts_that_begin_alike_share_what_is_alike(measure: Measure, name: str) -> None:
    start = text(20, 0)
    lanes = [
        ([*start, 5, 6], text(4, 1)),
        ([*start, 5, 7, 8], []),
        (start, [5, 6, *text(4, 1)]),
        (start[:8], [3]),
        ([*start[:8], (start[8] + 1) % VOCABULARY, *start[9:]], text(5, 2)),
    ]
    bank = filled(measure.model(name), lanes[:1], slots=5)
    go_on(bank, lanes[:1])
    assert put(bank, *list(enumerate(lanes))[1:]).reused == 21 + 26 + 8 + 8
    assert_all_fresh(measure, name, bank, lanes)


@every_measure
@every_t5
def test_outputs_that_are_alike_share_nothing_where_the_prompts_differ(
    measure: Measure, name: str
) -> None:
    output = text(9, 0)
    lanes = [(text(length, length), output) for length in (3, 12, 12, 40)]
    lanes[2] = ([*lanes[1][0][:-1], (lanes[1][0][-1] + 1) % VOCABULARY], output)
    bank = filled(measure.model(name), lanes[:1], slots=4)
    go_on(bank, lanes[:1])
    assert put(bank, (1, lanes[1])).reused == 0
    assert put(bank, (2, lanes[2]), (3, lanes[3])).reused == 0
    assert_all_fresh(measure, name, bank, lanes)


@every_measure
@every_t5
@pytest.mark.parametrize("stepped", [True, False])
def test_a_slot_answers_for_the_prompt_it_has_now(
    measure: Measure, name: str, stepped: bool
) -> None:
    """A new example is opened beside a lane that takes over much, and writes what that one wrote."""
    prompt, other, output = text(6, 0), text(8, 1), text(9, 2)
    bank = filled(measure.model(name), [(prompt, output)], slots=4)
    go_on(bank, [(prompt, output)])
    lanes = [(prompt, output), (prompt, [*output, 3]), (other, [])]
    put(bank, (1, lanes[1]), (2, lanes[2]))
    if stepped:
        assert_all_fresh(measure, name, bank, lanes)
    lanes.append((other, [*output, 4]))
    assert put(bank, (3, lanes[3])).reused == stepped, "nothing more was ever read for it"
    assert_all_fresh(measure, name, bank, lanes)


@every_measure
@every_t5
@pytest.mark.parametrize("length", [15, 16, 31])
def test_a_prefilled_slot_holds_nothing_of_a_lane_that_was_opened_with_it(
    measure: Measure, name: str, length: int
) -> None:
    """Where the columns taken over reach behind those prefilled for another prompt."""
    prompt, other, output = text(6, 0), text(8, 1), text(40, 2)
    bank = filled(measure.model(name), [(prompt, output)], slots=4)
    go_on(bank, [(prompt, output)])
    lanes = [(prompt, output), (prompt, [*output, 3]), (other, output[:length])]
    put(bank, (1, lanes[1]), (2, lanes[2]))
    lanes.append((other, [*output, 4]))
    assert put(bank, (3, lanes[3])).reused <= 1 + length
    assert_all_fresh(measure, name, bank, lanes)


@every_t5
def test_a_prompt_is_encoded_once_for_all_the_lanes_of_its_example(name: str) -> None:
    prompt, output = text(12, 0), text(5, 1)
    model = slot_model(name)
    bank = model.bank(5)
    assert put(bank, (0, (prompt, []))).prefilled >= 12
    lanes: list[Lane] = [(prompt, [])]
    for slot in range(1, 5):
        go_on(bank, lanes)
        lanes.append((prompt, []))
        assert put(bank, (slot, lanes[-1])) == Effort(reused=1), slot
    go_on(bank, lanes)
    # Also where it is long under way, and where the slot that was first has another example.
    feed(bank, [[0, *output]] * 5, [-1] * 5)
    put(bank, (0, (text(4, 2), [])))
    assert put(bank, (1, (prompt, output))) == Effort(reused=6)
    assert put(bank, (2, (text(4, 2), [])), (3, (text(4, 2), []))).reused == 0


@every_t5
def test_lanes_opened_together_have_their_prompt_encoded_once(name: str) -> None:
    alone, together = (slot_model(name).bank(5) for _ in range(2))
    one = put(alone, (0, (text(12, 0), [])))
    assert put(together, *((slot, (text(12, 0), [])) for slot in range(5))) == one


# --- everything at once -----------------------------------------------------------------------------


@dataclass
class Walk:
    """Lanes that come, go on, are rejected, split and move, with few tokens, so that many are alike."""

    source: random.Random
    prompts: list[list[int]]
    lanes: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)

    def newcomer(self) -> tuple[list[int], list[int]]:
        """A new lane, or one like another: as long, shorter, longer, or going another way."""
        if not self.lanes or self.source.random() < 0.3:
            return self.source.choice(self.prompts), self.tokens(self.source.choice([0, 0, 1, 17]))
        prompt, output = self.source.choice(list(self.lanes.values()))
        kept = (
            output[: self.source.randint(0, len(output))] if self.source.random() < 0.5 else output
        )
        return prompt, [*kept, *self.tokens(self.source.choice([0, 1, 1, 5]))]

    def tokens(self, count: int) -> list[int]:
        return [self.source.choice([3, 4]) for _ in range(count)]


@every_measure
@every_model
def test_a_long_walk_of_openings_and_feeds_is_at_every_step_what_fresh_banks_give(
    measure: Measure, name: str
) -> None:
    source = random.Random(7)
    start = [source.choice([3, 4]) for _ in range(10)]
    walk = Walk(source, [start, [*start, 3, 4], [*start[:6], 4, 3, 3], [4], [3, 4] * 12])
    slots = 6
    bank = measure.model(name).bank(slots)
    reused = compared = 0
    for step in range(60):
        for slot in [slot for slot in walk.lanes if source.random() < 0.15]:
            del walk.lanes[slot]
        free = [slot for slot in range(slots) if slot not in walk.lanes]
        taken = source.sample(free, source.randint(0 if walk.lanes else 1, len(free)))
        newcomers = [(slot, walk.newcomer()) for slot in taken]
        if newcomers:
            reused += put(bank, *newcomers).reused
        walk.lanes.update(newcomers)
        width, last = source.randint(1, 4), max(walk.lanes) + 1
        fed, starts = [], []
        for slot in range(last):
            output = walk.lanes[slot][1] if slot in walk.lanes else []
            behind = source.randint(1, min(2, len(output) + 1))  # as a drafter or a verifier does
            known = [0, *output][-behind:]
            fed.append([*known, *walk.tokens(width + 1)][: width + 1])
            starts.append(len(output) - behind)
        logits = feed(bank, fed, starts)
        drafted = {
            slot: (prompt, [*output[: max(0, starts[slot])], *fed[slot][max(0, -starts[slot]) :]])
            for slot, (prompt, output) in walk.lanes.items()
        }
        measure.assert_fresh(
            logits[list(drafted)],
            name,
            list(drafted.values()),
            [fed[slot] for slot in drafted],
            step,
        )
        compared += len(drafted)
        for slot, (prompt, whole) in drafted.items():
            kept = whole[: source.randint(len(walk.lanes[slot][1]), len(whole))]
            walk.lanes[slot] = prompt, [*kept, *walk.tokens(1)]
        walk.lanes = {slot: lane for slot, lane in walk.lanes.items() if len(lane[1]) < 60}
    assert compared > 150
    assert reused > 500
