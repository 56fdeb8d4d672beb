"""Lanes: token sequences in the making, each with all strategies that so far agree on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from pipeline.protocol.accounting import Count
from pipeline.protocol.blocks import Failure, Origin, Sum, Thought
from pipeline.protocol.strategies import KINDS
from pipeline.randomness import example_key
from pipeline.records import (
    Counts,
    Example,
    FinishReason,
    Outcome,
    Risk,
    RowError,
    Setting,
    Source,
    Strategy,
    TokenTrace,
)
from pipeline.workers.wire import Bools, Ints, VerifyReply

EndsText = Callable[[Sequence[int]], bool]
"""Whether output ids hold a stop string."""

_COUNTS = tuple(count.name.lower() for count in Count)
"""The fields of `Counts` in the order of a tally's columns."""

_ERRORS = {
    Failure.DRAFTER_NAN: "the drafter gave NaN or infinite logits",
    Failure.VERIFIER_NAN: "the verifier gave NaN or infinite logits",
    Failure.DRAFTER_CONTEXT: "the drafter's context is full and the strategy has no verifier",
    Failure.TARGET_INVALID: "the custom target is no distribution: negative, or not summing to one",
}


class End(IntEnum):
    """Whether and why a pair's text ends."""

    NOT = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3


@dataclass(frozen=True)
class Tallies:
    """What strategies have cost so far in their lanes, one row a pair; see `Count` and `Sum`."""

    strategies: Ints
    """Indexes into the run's strategies, (P,)."""
    counts: Ints
    sums: NDArray[np.float64]
    histogram: Ints
    """Rounds that accepted 0, 1, ... drafted tokens, (P, D + 1)."""
    traces: NDArray[np.object_]
    """A tuple of `TokenTrace` for each pair, (P,); empty where none is kept."""

    @classmethod
    def empty(cls, strategies: Sequence[int], setting: Setting) -> Tallies:
        """No cost yet."""
        pairs = len(strategies)
        return cls(
            strategies=np.array(strategies, dtype=np.int64),
            counts=np.zeros((pairs, len(Count)), dtype=np.int64),
            sums=np.zeros((pairs, len(Sum))),
            histogram=np.zeros((pairs, setting.draft_length + 1), dtype=np.int64),
            traces=_tuples([()] * pairs),
        )

    @classmethod
    def joined(cls, parts: Sequence[Tallies]) -> Tallies:
        """One after the other."""
        names = vars(parts[0])
        return cls(**{name: np.concatenate([vars(p)[name] for p in parts]) for name in names})

    def take(self, rows: Ints) -> Tallies:
        """Some of the pairs, as a copy."""
        return Tallies(**{name: values[rows] for name, values in vars(self).items()})

    def __len__(self) -> int:
        return len(self.strategies)

    def add(self, reply: VerifyReply) -> None:
        """Add a round, in place; the reply has one row a pair in the same order."""
        self.counts[:] += reply.counts
        self.sums[:] += reply.sums
        rounds, accepted = reply.counts[:, Count.ROUNDS], reply.counts[:, Count.ACCEPTED]
        self.histogram[np.arange(len(self)), accepted] += rounds
        if reply.thoughts.shape[1]:
            new = [(*kept, *_traced(reply, pair)) for pair, kept in enumerate(self.traces)]
            self.traces[:] = _tuples(new)

    def record(self, pair: int) -> Counts:
        """The counts of one pair as the record that ends in a row."""
        counts = self.counts[pair].tolist()
        histogram = tuple(self.histogram[pair].tolist()) if counts[Count.ROUNDS] else ()
        return Counts(**dict(zip(_COUNTS, counts, strict=True)), accepted_histogram=histogram)


@dataclass(frozen=True)
class Task:
    """An example to decode in one setting and repeat; all its lanes share it."""

    example: Example
    repeat: int
    setting: int
    ticket: int
    """Who waits for it."""
    opened: float = field(default_factory=time.perf_counter)

    @cached_property
    def key(self) -> int:
        """What the uniforms of the example are keyed by."""
        return example_key(self.example.example_id)


@dataclass(frozen=True)
class Lane:
    """One token sequence that waits for a slot, and the strategies that wrote it.

    Its tokens are the truth; what a cache holds of it is only a memo.
    """

    task: Task
    tallies: Tallies
    output_ids: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    bank: str = ""
    """Where the lane split off: the caches of that bank hold most of it."""


@dataclass(frozen=True)
class Finished:
    """An outcome and the ticket of the shard that waits for it."""

    ticket: int
    outcome: Outcome


@dataclass(frozen=True)
class Step:
    """What a round did to a bank, beside the lanes that go on: lanes that split off, and ends."""

    split: tuple[Lane, ...]
    finished: tuple[Finished, ...]


@dataclass(frozen=True)
class Rulebook:
    """What decides how lanes go on: the strategies, the setting, and what ends a text."""

    strategies: tuple[Strategy, ...]
    setting: Setting
    ends_text: EndsText | None = None

    @cached_property
    def uses_drafter(self) -> Bools:
        """For each strategy, whether it needs the drafter."""
        return np.array([KINDS[strategy.use].uses_drafter for strategy in self.strategies])

    @cached_property
    def uses_verifier(self) -> Bools:
        """For each strategy, whether it needs the verifier."""
        return np.array([KINDS[strategy.use].uses_verifier for strategy in self.strategies])

    @cached_property
    def eos_token_ids(self) -> Ints:
        """The ids that end a text."""
        return np.array(self.setting.eos_token_ids, dtype=np.int64)


class Seats:
    """The lanes in the slots of a bank, as arrays: a round touches all of them at once.

    S slots. Pairs stand in the order of their slots.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.tasks: list[Task | None] = [None] * slots
        self.lengths = np.zeros(slots, dtype=np.int64)
        """Tokens written so far."""
        self.keys = np.zeros(slots, dtype=np.int64)
        self.repeats = np.zeros(slots, dtype=np.int64)
        self.pair_slots = np.zeros(0, dtype=np.int64)
        """The slot of each pair."""
        self.tallies: Tallies | None = None
        # Two zeros stand before the first token, so that each lane has two last ones.
        self._tokens = np.zeros((slots, 2), dtype=np.int64)

    @property
    def held(self) -> list[int]:
        """The slots in use."""
        return [slot for slot, task in enumerate(self.tasks) if task is not None]

    @property
    def free(self) -> list[int]:
        """The slots not in use, lowest first."""
        return [slot for slot, task in enumerate(self.tasks) if task is None]

    def output_ids(self, slot: int) -> Ints:
        """What the lane in a slot has written."""
        return self._tokens[slot, 2 : 2 + self.lengths[slot]].copy()

    def last_tokens(self, lanes: int) -> Ints:
        """The last two tokens of the first lanes, int64 (A, 2); zeros where there are none."""
        columns = self.lengths[:lanes, None] + np.arange(2)
        return np.take_along_axis(self._tokens[:lanes], columns, axis=1)

    def seat(self, lanes: Sequence[tuple[int, Lane]]) -> None:
        """Put lanes into free slots."""
        for slot, lane in lanes:
            self.tasks[slot] = lane.task
            self.keys[slot], self.repeats[slot] = lane.task.key, lane.task.repeat
            self.lengths[slot] = len(lane.output_ids)
            self._widen(int(self.lengths[slot]))
            self._tokens[slot, 2 : 2 + self.lengths[slot]] = lane.output_ids
        slots = [self.pair_slots, *(np.full(len(lane.tallies), slot) for slot, lane in lanes)]
        parts = [lane.tallies for _, lane in lanes]
        tallies = Tallies.joined([self.tallies, *parts] if self.tallies else parts)
        self._set_pairs(np.concatenate(slots), tallies)

    def move(self, source: int, target: int) -> None:
        """Move a lane to a free slot."""
        self.tasks[target], self.tasks[source] = self.tasks[source], None
        for values in (self.keys, self.repeats, self.lengths, self._tokens):
            values[target] = values[source]
        self.lengths[source] = 0
        assert self.tallies is not None
        self._set_pairs(np.where(self.pair_slots == source, target, self.pair_slots), self.tallies)

    def advance(self, reply: VerifyReply, rulebook: Rulebook, bank: str) -> Step:
        """Append each strategy's tokens; those that still agree stay together, others split off.

        Args:
            reply: one row a pair, in their order.
            bank: the name that lanes which split off remember.
        """
        assert self.tallies is not None
        self.tallies.add(reply)
        ends = self._ends(reply, rulebook)
        finished = tuple(
            self._finished(int(pair), End(int(ends[pair])), reply, rulebook)
            for pair in ends.nonzero()[0]
        )
        going = (ends == End.NOT).nonzero()[0]
        slots, first, leader = np.unique(
            self.pair_slots[going], return_index=True, return_inverse=True
        )
        leaders = going[first]
        same = (reply.num_tokens[going] == reply.num_tokens[leaders][leader]) & (
            reply.tokens[going] == reply.tokens[leaders][leader]
        ).all(axis=1)
        split = tuple(self._split_off(going[~same], reply, bank))
        self._append(slots, reply.tokens[leaders], reply.num_tokens[leaders])
        for slot in set(self.pair_slots[ends.nonzero()[0]].tolist()) - set(slots.tolist()):
            self.tasks[slot], self.lengths[slot] = None, 0
        if not same.all() or len(going) < len(self.pair_slots):
            staying = going[same]
            self._set_pairs(self.pair_slots[staying], self.tallies.take(staying))
        return Step(split, finished)

    def _set_pairs(self, slots: Ints, tallies: Tallies) -> None:
        order = np.argsort(slots, kind="stable")
        self.pair_slots, self.tallies = slots[order], tallies.take(order)

    def _widen(self, length: int) -> None:
        missing = 2 + length - self._tokens.shape[1]
        if missing > 0:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, max(missing, 64))))

    def _append(self, slots: Ints, tokens: Ints, num_tokens: Ints) -> None:
        """Write each slot's new tokens (R, D + 1) behind its old ones; those behind do not count."""
        columns = 2 + self.lengths[slots, None] + np.arange(tokens.shape[1])
        self._widen(int(columns.max(initial=0)))
        self._tokens[slots[:, None], columns] = tokens
        self.lengths[slots] += num_tokens

    def _ends(self, reply: VerifyReply, rulebook: Rulebook) -> Ints:
        """An `End` for each pair. A text that ends itself at the limit is a stop."""
        lengths = self.lengths[self.pair_slots] + reply.num_tokens
        pair = np.arange(len(lengths))
        last = reply.tokens[pair, np.maximum(reply.num_tokens - 1, 0)]
        stops = np.isin(last, rulebook.eos_token_ids) & (reply.num_tokens > 0)
        if rulebook.ends_text is not None:
            stops |= [rulebook.ends_text(self._written(index, reply)) for index in pair.tolist()]
        ends = np.where(lengths >= rulebook.setting.max_new_tokens, End.LENGTH, End.NOT)
        ends = np.where(stops, End.STOP, ends)
        return np.where(reply.failed != Failure.NONE, End.ERROR, ends)

    def _written(self, pair: int, reply: VerifyReply) -> list[int]:
        """A pair's text with its new tokens."""
        new = reply.tokens[pair, : reply.num_tokens[pair]]
        return [*self.output_ids(int(self.pair_slots[pair])).tolist(), *new.tolist()]

    def _split_off(self, pairs: Ints, reply: VerifyReply, bank: str) -> Iterable[Lane]:
        """Lanes for the pairs that left their slot's lane, those that agree together."""
        assert self.tallies is not None
        agreed: dict[tuple[int, ...], list[int]] = {}
        for pair in pairs.tolist():
            new = reply.tokens[pair, : reply.num_tokens[pair]].tolist()
            agreed.setdefault((int(self.pair_slots[pair]), *new), []).append(pair)
        for (slot, *new), members in agreed.items():
            task = self.tasks[slot]
            assert task is not None
            output_ids = np.array([*self.output_ids(slot), *new], dtype=np.int64)
            yield Lane(task, self.tallies.take(np.array(members)), output_ids, bank)

    def _finished(self, pair: int, end: End, reply: VerifyReply, rulebook: Rulebook) -> Finished:
        task = self.tasks[self.pair_slots[pair]]
        assert task is not None
        assert self.tallies is not None
        sums = self.tallies.sums[pair].tolist()
        outcome = Outcome(
            example_id=task.example.example_id,
            repeat=task.repeat,
            strategy=rulebook.strategies[self.tallies.strategies[pair]],
            output_ids=tuple(self._written(pair, reply)),
            finish_reason=cast(FinishReason, end.name.lower()),
            counts=self.tallies.record(pair),
            error=_error(int(reply.failed[pair])),
            wall_seconds=time.perf_counter() - task.opened,
            setting=task.setting,
            risk=Risk(sums[Sum.EXPECTED_REJECTED], sums[Sum.EXPECTED_LOSS]),
            log_confidence=sums[Sum.LOG_CONFIDENCE],
            trace=self.tallies.traces[pair],
        )
        return Finished(task.ticket, outcome)


def _error(failed: int) -> RowError | None:
    if failed == Failure.NONE:
        return None
    return RowError(Failure(failed).name.lower(), _ERRORS[Failure(failed)])


def _tuples(values: Sequence[tuple[TokenTrace, ...]]) -> NDArray[np.object_]:
    """An array of tuples; numpy would make a table of tuples that are equally long."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def _traced(reply: VerifyReply, pair: int) -> tuple[TokenTrace, ...]:
    """The trace of a pair's new tokens; empty where none is kept."""
    thoughts = reply.thoughts[pair]
    tokens = int(reply.num_tokens[pair]) if len(thoughts) else 0
    return tuple(
        TokenTrace(
            source=cast(Source, Origin(int(reply.origins[pair, column])).name.lower()),
            deferred=bool(reply.deferred[pair, column]),
            accepted=int(reply.origins[pair, column]) == Origin.DRAFT,
            drafter_confidence=_known(thoughts[column, Thought.DRAFTER_CONFIDENCE]),
            verifier_confidence=_known(thoughts[column, Thought.VERIFIER_CONFIDENCE]),
            drafter_max=_known(thoughts[column, Thought.DRAFTER_MAX]),
            verifier_max=_known(thoughts[column, Thought.VERIFIER_MAX]),
            total_variation=_known(thoughts[column, Thought.TOTAL_VARIATION]),
        )
        for column in range(tokens)
    )


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
