"""What a verdict counts as, had its strategy run alone.

A sequential strategy shares rounds with others here, yet is charged what a sequential system pays:
one drafter call a token, one verifier call a deferred token. `verifier_tokens` is the positions
whose verifier distribution was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from pipeline.protocol.strategies import Execution


class Count(IntEnum):
    """The columns of a counts tensor, named as in `records.Counts`."""

    DRAFTER_CALLS = 0
    VERIFIER_CALLS = 1
    VERIFIER_TOKENS = 2
    DRAFTED = 3
    ACCEPTED = 4
    REJECTED = 5
    DEFERRED = 6
    BONUS_TOKENS = 7
    ROUNDS = 8


@dataclass(frozen=True)
class Walk:
    """How far G pairs of one execution walked into a block; int64 (G,) each."""

    num_drafted: Tensor
    accepted: Tensor
    """Leading drafted tokens that are the strategy's own."""
    replaced: Tensor
    """1 where a token replaced the first drafted one that was not."""
    bonus: Tensor
    """1 where a token followed a block taken whole."""
    scored: Tensor
    """Positions a speculative verification scores: the drafted ones, and one more for a bonus."""
    deferred: Tensor
    """Deferrals among the drafted positions that were looked at."""
    asked: Tensor
    """Drafter calls of a speculative block: its tokens, and one where it looked and fell back."""


def count(execution: Execution, walk: Walk) -> Tensor:
    """The counts of one round, int64 (G, len(Count))."""
    emitted = walk.accepted + walk.replaced + walk.bonus
    one = torch.ones_like(emitted)
    charges: dict[Count, Tensor]
    if execution is Execution.SPECULATIVE:
        charges = {
            Count.DRAFTER_CALLS: walk.asked,
            Count.VERIFIER_CALLS: one,
            Count.VERIFIER_TOKENS: walk.scored,
            Count.DRAFTED: walk.num_drafted,
            Count.ACCEPTED: walk.accepted,
            Count.REJECTED: walk.replaced,
            Count.DEFERRED: walk.deferred,
            Count.BONUS_TOKENS: walk.bonus,
            Count.ROUNDS: one,
        }
    elif execution is Execution.DRAFTER_ONLY:
        charges = {Count.DRAFTER_CALLS: emitted}
    else:
        # A bonus here is a token of the verifier where the drafter could not be asked.
        deferred = walk.deferred + walk.bonus
        if execution is Execution.VERIFIER_ONLY:
            deferred = emitted
        calls = emitted if execution is Execution.ORACLE else deferred
        charges = {
            Count.VERIFIER_CALLS: calls,
            Count.VERIFIER_TOKENS: calls,
            Count.DEFERRED: deferred,
        }
        if execution is not Execution.VERIFIER_ONLY:
            charges[Count.DRAFTER_CALLS] = emitted - walk.bonus
    counts = emitted.new_zeros(len(emitted), len(Count))
    for column, values in charges.items():
        counts[:, column] = values
    return counts
