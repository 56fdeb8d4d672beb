"""Lanes: token sequences in the making, each with all strategies that so far agree on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipeline.protocol.accounting import Count
from pipeline.protocol.verification import DRAFTER_BROKEN
from pipeline.randomness import example_key
from pipeline.records import Counts, Example, FinishReason, Outcome, RowError, Setting, Strategy
from pipeline.workers.wire import VerifyReply


@dataclass(frozen=True)
class Tally:
    """What one strategy has cost so far in its lane: `Count` columns, and the accepted histogram."""

    counts: NDArray[np.int64]
    histogram: NDArray[np.int64]

    @classmethod
    def empty(cls, setting: Setting) -> Tally:
        """No cost yet."""
        histogram = np.zeros(setting.draft_length + 1, dtype=np.int64)
        return cls(np.zeros(len(Count), dtype=np.int64), histogram)

    def plus(self, counts: NDArray[np.int64]) -> Tally:
        """With one round added."""
        histogram = self.histogram.copy()
        histogram[counts[Count.ACCEPTED]] += counts[Count.ROUNDS]
        return Tally(self.counts + counts, histogram)

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
    shard: int
    tallies: dict[int, Tally]
    output_ids: tuple[int, ...] = ()
    opened: float = field(default_factory=time.perf_counter)
    key: int = 0

    @classmethod
    def first(
        cls, example: Example, repeat: int, shard: int, strategies: int, setting: Setting
    ) -> Lane:
        """The lane in which all strategies of an example start."""
        tallies = {index: Tally.empty(setting) for index in range(strategies)}
        return cls(example, repeat, shard, tallies, key=example_key(example.example_id))


@dataclass(frozen=True)
class Finished:
    """An outcome and the shard that waits for it."""

    shard: int
    outcome: Outcome


@dataclass(frozen=True)
class Step:
    """What a verdict did to a lane: the lanes that go on, first the one that keeps the slot, and ends."""

    lanes: tuple[Lane, ...]
    finished: tuple[Finished, ...]


def advance(
    lane: Lane,
    pairs: Sequence[int],
    reply: VerifyReply,
    strategies: Sequence[Strategy],
    setting: Setting,
) -> Step:
    """Append each strategy's tokens; strategies that still agree stay together, the others split off.

    Args:
        pairs: rows of the reply, in the order of the lane's tallies.
    """
    agreed: dict[tuple[int, ...], dict[int, Tally]] = {}
    finished: list[Finished] = []
    for (index, tally), pair in zip(lane.tallies.items(), pairs, strict=True):
        new = tuple(reply.tokens[pair, : reply.num_tokens[pair]].tolist())
        tally = tally.plus(reply.counts[pair])
        output_ids = lane.output_ids + new
        error = _error(int(reply.failed[pair]))
        reason: FinishReason | None = "error" if error else finish_reason(output_ids, setting)
        if reason is None:
            agreed.setdefault(new, {})[index] = tally
            continue
        seconds = time.perf_counter() - lane.opened
        outcome = Outcome(
            example_id=lane.example.example_id,
            repeat=lane.repeat,
            strategy=strategies[index],
            output_ids=output_ids,
            finish_reason=reason,
            counts=tally.record(),
            error=error,
            wall_seconds=seconds,
        )
        finished.append(Finished(lane.shard, outcome))
    lanes = [_extended(lane, new, tallies) for new, tallies in agreed.items()]
    return Step(tuple(lanes), tuple(finished))


def finish_reason(output_ids: Sequence[int], setting: Setting) -> FinishReason | None:
    """Why a text ends, or None. An end-of-text token at the limit is a stop, not a length stop."""
    if output_ids and output_ids[-1] in setting.eos_token_ids:
        return "stop"
    return "length" if len(output_ids) >= setting.max_new_tokens else None


def _extended(lane: Lane, new: tuple[int, ...], tallies: dict[int, Tally]) -> Lane:
    output_ids = lane.output_ids + new
    return Lane(lane.example, lane.repeat, lane.shard, tallies, output_ids, lane.opened, lane.key)


def _error(failed: int) -> RowError | None:
    if failed == 0:
        return None
    model = "drafter" if failed == DRAFTER_BROKEN else "verifier"
    return RowError(f"{model}_nan", f"the {model} gave NaN or infinite logits")
