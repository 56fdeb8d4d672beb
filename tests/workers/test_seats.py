"""The lanes of a bank as arrays are the lanes that a plain list of objects would be.

Random replies are applied to `Seats` and, pair by pair, to lanes of Python lists; lanes that split off
wait for a while, come back in other slots and are moved.

Planted faults these tests catch: a tally that a lane which split off shares with the one that stayed;
pairs out of the order of their slots; a slot that is freed while a strategy goes on in it, or kept
when all have ended; a move that leaves the length behind, or forgets the key; the leader's tokens
given to a pair that only begins like it; pairs of two slots split off together; a text that loses its
last token when it splits; a length tested before a stop, a stop before an error; a stop read off the
zeros behind no tokens; the histogram's round counted for strategies without rounds; a trace of another
pair; a lane that forgets its bank.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest

from pipeline.protocol.accounting import Count
from pipeline.protocol.blocks import Failure, Origin, Sum, Thought
from pipeline.records import Counts, Example, Outcome, Sampling, Setting, Strategy, TokenTrace
from pipeline.workers.lanes import EndsText, Lane, Rulebook, Seats, Step, Tallies, Task
from pipeline.workers.wire import VerifyReply
from tests.strategies import one_of_each

SLOTS, COLUMNS, ROUNDS = 5, 3, 60
EOS = 1
SETTING = Setting(COLUMNS, 14, Sampling(1.0), eos_token_ids=(EOS, 99))
ZERO_ENDS = replace(SETTING, eos_token_ids=(EOS, 0))
"""Zeros stand behind a pair's tokens too."""
STRATEGIES = tuple(one_of_each()[:9])


def holds_5_6(ids: tuple[int, ...]) -> bool:
    """A stop string that may stand in the new tokens, or partly in the old ones."""
    return (5, 6) in list(pairwise(ids))[-COLUMNS - 1 :]


@dataclass
class Pair:
    """One strategy of a lane, as plain numbers."""

    strategy: int
    counts: list[int] = field(default_factory=lambda: [0] * len(Count))
    sums: list[float] = field(default_factory=lambda: [0.0] * len(Sum))
    histogram: list[int] = field(default_factory=lambda: [0] * (COLUMNS + 1))
    trace: tuple[TokenTrace, ...] = ()

    def add(self, reply: VerifyReply, row: int) -> None:
        for count in Count:
            self.counts[count] += int(reply.counts[row, count])
        for sum_ in Sum:
            self.sums[sum_] += float(reply.sums[row, sum_])
        if reply.counts[row, Count.ROUNDS]:
            self.histogram[int(reply.counts[row, Count.ACCEPTED])] += 1
        if reply.thoughts.shape[1]:
            self.trace += tuple(traced(reply, row, c) for c in range(int(reply.num_tokens[row])))


def traced(reply: VerifyReply, row: int, column: int) -> TokenTrace:
    known = [None if np.isnan(value) else float(value) for value in reply.thoughts[row, column]]
    origin = Origin(int(reply.origins[row, column]))
    deferred, accepted = bool(reply.deferred[row, column]), origin is Origin.DRAFT
    return TokenTrace(origin.name.lower(), deferred, accepted, *known)


@dataclass
class Plain:
    """A lane in the making."""

    task: Task
    output_ids: tuple[int, ...]
    pairs: list[Pair]


class PlainSeats:
    """What `Seats` does, one pair at a time."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.lanes: dict[int, Plain] = {}

    def advance(
        self, reply: VerifyReply, ends_text: EndsText | None
    ) -> tuple[list[Plain], list[tuple[int, Outcome]]]:
        """The lanes that split off, and the ends by ticket."""
        row, split, ends = 0, [], []
        for slot, lane in sorted(self.lanes.items()):
            going: dict[tuple[int, ...], list[Pair]] = {}
            for pair in lane.pairs:
                new = tuple(reply.tokens[row, : reply.num_tokens[row]].tolist())
                pair.add(reply, row)
                text, failed = (*lane.output_ids, *new), int(reply.failed[row])
                reason = None
                if failed:
                    reason = "error"
                elif (new and new[-1] in self.setting.eos_token_ids) or (
                    ends_text and ends_text(text)
                ):
                    reason = "stop"
                elif len(text) >= self.setting.max_new_tokens:
                    reason = "length"
                if reason is None:
                    going.setdefault(text, []).append(pair)
                else:
                    ends.append((lane.task.ticket, outcome(lane, pair, text, reason, failed)))
                row += 1
            parts = [Plain(lane.task, text, pairs) for text, pairs in going.items()]
            if parts:
                self.lanes[slot] = parts[0]
            else:
                del self.lanes[slot]
            split += parts[1:]
        return split, ends


def outcome(lane: Plain, pair: Pair, text: tuple[int, ...], reason: str, failed: int) -> Outcome:
    named = {count.name.lower(): pair.counts[count] for count in Count}
    histogram = tuple(pair.histogram) if pair.counts[Count.ROUNDS] else ()
    return Outcome(
        example_id=lane.task.example.example_id,
        repeat=lane.task.repeat,
        strategy=STRATEGIES[pair.strategy],
        output_ids=text,
        finish_reason=reason,
        counts=Counts(**named, accepted_histogram=histogram),
        error=Failure(failed).name.lower() if failed else None,
        setting=lane.task.setting,
        log_confidence=pair.sums[Sum.LOG_CONFIDENCE],
        trace=pair.trace,
    )


def random_reply(source: random.Random, seats: Seats, trace: bool) -> VerifyReply:
    """Few tokens, so that some strategies of a lane agree, begin alike or part."""
    pairs, width = len(seats.pair_slots), COLUMNS + 1
    numbers = np.random.default_rng(source.randrange(2**32))
    texts = [
        [source.choice([3, 4, 5, 6, 7, 0]) for _ in range(source.randint(1, width))]
        for _ in range(3)
    ]
    tokens = np.zeros((pairs, width), dtype=np.int64)
    num_tokens, failed = np.zeros(pairs, dtype=np.int64), np.zeros(pairs, dtype=np.int64)
    for row in range(pairs):
        text = list(source.choices(texts, [6, 2, 1])[0])
        if source.random() < 0.06:
            text[-1] = EOS
        if source.random() < 0.06:
            failed[row] = source.randint(1, 4)
            text = text[: source.randint(0, len(text) - 1)]
        if source.random() < 0.1:
            text = text[: source.randint(0, len(text))]
        num_tokens[row] = len(text)
        tokens[row, : len(text)] = text
    counts = numbers.integers(0, 4, (pairs, len(Count)))
    counts[:, Count.ROUNDS] = numbers.integers(0, 2, pairs)
    counts[:, Count.ACCEPTED] *= counts[:, Count.ROUNDS]
    thoughts = numbers.integers(0, 9, (pairs, width, len(Thought))).astype(np.float32) / 8
    thoughts[numbers.random(thoughts.shape) < 0.2] = np.nan
    return VerifyReply(
        round=0,
        tokens=tokens,
        num_tokens=num_tokens,
        counts=counts,
        sums=numbers.integers(0, 9, (pairs, len(Sum))) / 8,  # exact, in whatever order
        failed=failed,
        origins=numbers.integers(0, len(Origin), (pairs, width)),
        deferred=numbers.random((pairs, width)) < 0.5,
        thoughts=thoughts if trace else thoughts[:, :0],
    )


def assert_tallies(tallies: Tallies, pairs: list[Pair]) -> None:
    assert tallies.strategies.tolist() == [pair.strategy for pair in pairs]
    assert tallies.counts.tolist() == [pair.counts for pair in pairs]
    assert tallies.sums.tolist() == [pair.sums for pair in pairs]
    assert tallies.histogram.tolist() == [pair.histogram for pair in pairs]
    assert tallies.traces.tolist() == [pair.trace for pair in pairs]


def assert_same(seats: Seats, plain: PlainSeats) -> None:
    assert seats.held == sorted(plain.lanes)
    assert seats.free == [slot for slot in range(SLOTS) if slot not in plain.lanes]
    pairs = [(slot, pair) for slot, lane in sorted(plain.lanes.items()) for pair in lane.pairs]
    assert seats.pair_slots.tolist() == [slot for slot, _ in pairs]
    if seats.tallies is not None:
        assert_tallies(seats.tallies, [pair for _, pair in pairs])
    last = seats.last_tokens(SLOTS).tolist()
    for slot in range(SLOTS):
        text = plain.lanes[slot].output_ids if slot in plain.lanes else ()
        assert seats.lengths[slot] == len(text)
        assert seats.output_ids(slot).tolist() == list(text)
        assert last[slot] == [0, 0, *text][-2:]
    for slot, lane in plain.lanes.items():
        assert seats.tasks[slot] is lane.task
        assert (seats.keys[slot], seats.repeats[slot]) == (lane.task.key, lane.task.repeat)


def assert_step(step: Step, split: list[Plain], ends: list[tuple[int, Outcome]], bank: str) -> None:
    assert len(step.split) == len(split)
    for lane, expected in zip(step.split, split, strict=True):
        assert lane.task is expected.task
        assert lane.output_ids.tolist() == list(expected.output_ids)
        assert lane.bank == bank
        assert_tallies(lane.tallies, expected.pairs)
    assert len(step.finished) == len(ends)
    for finished, (ticket, expected) in zip(step.finished, ends, strict=True):
        got = finished.outcome
        code = None if got.error is None else got.error.code
        assert finished.ticket == ticket
        for name in vars(expected).keys() - {"error", "wall_seconds", "risk"}:
            assert getattr(got, name) == getattr(expected, name), name
        assert code == expected.error


def new_task(number: int) -> Task:
    example = Example(f"example {number}", None, (), (2, 3))
    return Task(example, repeat=number % 3, setting=number % 2, ticket=number // 4)


@pytest.mark.parametrize("trace", [False, True], ids=["counts", "traces"])
@pytest.mark.parametrize("ends_text", [None, holds_5_6], ids=["free", "stop string"])
@pytest.mark.parametrize("seed", range(5))
def test_seats_are_plain_lanes(seed: int, ends_text: EndsText | None, trace: bool) -> None:
    source = random.Random(seed)
    setting = ZERO_ENDS if seed % 2 else SETTING
    rulebook = Rulebook(STRATEGIES, setting, ends_text)
    seats, plain = Seats(SLOTS), PlainSeats(setting)
    waiting: list[tuple[Lane, Plain]] = []
    tasks = at_once = splits = moves = 0
    reasons = set()
    for number in range(ROUNDS):
        if len(waiting) < 3:
            tasks += 1
            strategies = source.sample(range(len(STRATEGIES)), source.randint(1, len(STRATEGIES)))
            lane = Lane(new_task(tasks), Tallies.empty(strategies, setting))
            waiting.append((lane, Plain(lane.task, (), [Pair(s) for s in strategies])))
        if seats.free and waiting:
            taken = source.sample(seats.free, min(len(seats.free), source.randint(1, 3)))
            source.shuffle(waiting)
            chosen = [(slot, waiting.pop()) for slot in taken if waiting]
            seats.seat([(slot, lane) for slot, (lane, _) in chosen])
            plain.lanes |= {slot: lane for slot, (_, lane) in chosen}
            assert_same(seats, plain)
        if seats.free and seats.held and source.random() < 0.9:
            start, target = source.choice(seats.held), source.choice(seats.free)
            seats.move(start, target)
            plain.lanes[target] = plain.lanes.pop(start)
            moves += 1
            assert_same(seats, plain)
        reply = random_reply(source, seats, trace)
        held, bank = len(seats.held), f"bank {number}"
        step = seats.advance(reply, rulebook, bank)
        split, ends = plain.advance(reply, ends_text)
        assert_step(step, split, ends, bank)
        assert_same(seats, plain)
        waiting += list(zip(step.split, split, strict=True))
        at_once = max(at_once, held - len(seats.held))
        splits += len(split)
        reasons |= {outcome.finish_reason for _, outcome in ends}
    assert splits > 10
    assert moves > 3
    assert at_once > 1, "never did several slots end at once"
    assert reasons == {"stop", "length", "error"}


def test_every_slot_may_end_in_the_same_round() -> None:
    seats, rulebook = Seats(3), Rulebook((Strategy("drafter"),), SETTING)
    lanes = [Lane(new_task(n), Tallies.empty([0], SETTING)) for n in range(3)]
    seats.seat(list(enumerate(lanes)))
    reply = random_reply(random.Random(0), seats, trace=False)
    reply.tokens[:, 0], reply.num_tokens[:], reply.failed[:] = EOS, 1, 0
    step = seats.advance(reply, rulebook, "bank")
    assert [finished.outcome.output_ids for finished in step.finished] == [(EOS,)] * 3
    assert (seats.held, seats.free) == ([], [0, 1, 2])
    assert len(seats.pair_slots) == 0
    seats.seat([(1, lanes[0])])
    assert seats.held == [1]
    assert seats.output_ids(1).tolist() == []


def test_a_longer_text_than_any_before_finds_room() -> None:
    seats = Seats(2)
    for length in (0, 63, 64, 200):
        text = np.arange(length) % 50
        seats.seat([(1, Lane(new_task(0), Tallies.empty([0], SETTING), text))])
        assert seats.output_ids(1).tolist() == text.tolist()
        seats.tasks[1] = None
