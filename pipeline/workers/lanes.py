"""Lanes: token sequences in the making, each with all strategies that so far agree on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from pipeline.protocol.accounting import Count
from pipeline.protocol.blocks import Failure, Origin, Sum, Thought
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
from pipeline.workers.wire import VerifyReply

EndsText = Callable[[Sequence[int]], bool]
"""Whether output ids hold a stop string."""

_ERRORS = {
    Failure.DRAFTER_NAN: "the drafter gave NaN or infinite logits",
    Failure.VERIFIER_NAN: "the verifier gave NaN or infinite logits",
    Failure.DRAFTER_CONTEXT: "the drafter's context is full and the strategy has no verifier",
    Failure.TARGET_INVALID: "the custom target is no distribution: negative, or not summing to one",
}


@dataclass(frozen=True)
class Tally:
    """What one strategy has cost so far in its lane; columns are `Count` and `Sum`."""

    counts: NDArray[np.int64]
    sums: NDArray[np.float64]
    histogram: NDArray[np.int64]
    trace: tuple[TokenTrace, ...] = ()

    @classmethod
    def empty(cls, setting: Setting) -> Tally:
        """No cost yet."""
        histogram = np.zeros(setting.draft_length + 1, dtype=np.int64)
        return cls(np.zeros(len(Count), dtype=np.int64), np.zeros(len(Sum)), histogram)

    def plus(self, reply: VerifyReply, pair: int) -> Tally:
        """With one round added."""
        counts, histogram = reply.counts[pair], self.histogram.copy()
        histogram[counts[Count.ACCEPTED]] += counts[Count.ROUNDS]
        trace = self.trace + _traced(reply, pair)
        return Tally(self.counts + counts, self.sums + reply.sums[pair], histogram, trace)

    def record(self) -> Counts:
        """As the record that ends in a row."""
        named = {count.name.lower(): int(self.counts[count]) for count in Count}
        speculative = self.counts[Count.ROUNDS] > 0
        histogram = tuple(self.histogram.tolist()) if speculative else ()
        return Counts(**named, accepted_histogram=histogram)


@dataclass(frozen=True)
class Lane:
    """One token sequence, and the strategies (by index, with their tallies) that wrote it.

    Its tokens are the truth; what a cache holds of it is only a memo.
    """

    example: Example
    repeat: int
    setting: int
    shard: int
    tallies: dict[int, Tally]
    output_ids: tuple[int, ...] = ()
    opened: float = field(default_factory=time.perf_counter)
    key: int = 0

    @classmethod
    def first(
        cls, example: Example, repeat: int, setting: int, shard: int, tallies: dict[int, Tally]
    ) -> Lane:
        """The lane in which all strategies of an example start."""
        return cls(example, repeat, setting, shard, tallies, key=example_key(example.example_id))


@dataclass(frozen=True)
class Finished:
    """An outcome and the shard that waits for it."""

    shard: int
    outcome: Outcome


@dataclass(frozen=True)
class Step:
    """What a verdict did to a lane: the lanes that go on (the first keeps the slot), and the ends."""

    lanes: tuple[Lane, ...]
    finished: tuple[Finished, ...]


@dataclass(frozen=True)
class Rulebook:
    """What decides how lanes go on: the strategies, the setting, and what ends a text."""

    strategies: tuple[Strategy, ...]
    setting: Setting
    ends_text: EndsText | None = None

    def advance(self, lane: Lane, pairs: Sequence[int], reply: VerifyReply) -> Step:
        """Append each strategy's tokens; those that still agree stay together, others split off.

        Args:
            pairs: rows of the reply, in the order of the lane's tallies.
        """
        agreed: dict[tuple[int, ...], dict[int, Tally]] = {}
        finished: list[Finished] = []
        for (index, tally), pair in zip(lane.tallies.items(), pairs, strict=True):
            new = tuple(reply.tokens[pair, : reply.num_tokens[pair]].tolist())
            tally = tally.plus(reply, pair)
            error = _error(int(reply.failed[pair]))
            reason = "error" if error else self.finish_reason(lane.output_ids + new)
            if reason is None:
                agreed.setdefault(new, {})[index] = tally
                continue
            outcome = self._outcome(lane, index, new, tally, reason, error)
            finished.append(Finished(lane.shard, outcome))
        lanes = [
            replace(lane, tallies=tallies, output_ids=lane.output_ids + new)
            for new, tallies in agreed.items()
        ]
        return Step(tuple(lanes), tuple(finished))

    def finish_reason(self, output_ids: Sequence[int]) -> Literal["stop", "length"] | None:
        """Why a text ends, or None. A text that ends itself at the limit is a stop."""
        if output_ids and output_ids[-1] in self.setting.eos_token_ids:
            return "stop"
        if self.ends_text is not None and self.ends_text(output_ids):
            return "stop"
        return "length" if len(output_ids) >= self.setting.max_new_tokens else None

    def _outcome(
        self,
        lane: Lane,
        index: int,
        new: tuple[int, ...],
        tally: Tally,
        reason: FinishReason,
        error: RowError | None,
    ) -> Outcome:
        sums = tally.sums.tolist()
        return Outcome(
            example_id=lane.example.example_id,
            repeat=lane.repeat,
            strategy=self.strategies[index],
            output_ids=lane.output_ids + new,
            finish_reason=reason,
            counts=tally.record(),
            error=error,
            wall_seconds=time.perf_counter() - lane.opened,
            setting=lane.setting,
            risk=Risk(sums[Sum.EXPECTED_REJECTED], sums[Sum.EXPECTED_LOSS]),
            log_confidence=sums[Sum.LOG_CONFIDENCE],
            trace=tally.trace,
        )


def _error(failed: int) -> RowError | None:
    if failed == Failure.NONE:
        return None
    return RowError(Failure(failed).name.lower(), _ERRORS[Failure(failed)])


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
