"""What a verdict counts as, had its strategy run alone.

A sequential strategy shares rounds with others here, yet is charged what a sequential system pays:
one drafter call a token, one verifier call a deferred token. `verifier_tokens` is the positions
whose verifier distribution was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """How far P pairs walked into a block; int64 (P,) each."""

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


def count(executions: Mapping[Execution, Tensor], walk: Walk) -> Tensor:
    """The counts of one round, int64 (P, len(Count)).

    Args:
        executions: for each, which pairs execute so, bool (P,).
    """
    emitted = walk.accepted + walk.replaced + walk.bonus
    one = torch.ones_like(emitted)
    # A bonus here is a token of the verifier where the drafter could not be asked.
    by_both = emitted - walk.bonus
    deferred = walk.deferred + walk.bonus
    counts = emitted.new_zeros(len(emitted), len(Count))
    charges: dict[Execution, dict[Count, Tensor]] = {
        Execution.SPECULATIVE: {
            Count.DRAFTER_CALLS: walk.asked,
            Count.VERIFIER_CALLS: one,
            Count.VERIFIER_TOKENS: walk.scored,
            Count.DRAFTED: walk.num_drafted,
            Count.ACCEPTED: walk.accepted,
            Count.REJECTED: walk.replaced,
            Count.DEFERRED: walk.deferred,
            Count.BONUS_TOKENS: walk.bonus,
            Count.ROUNDS: one,
        },
        Execution.DRAFTER_ONLY: {Count.DRAFTER_CALLS: emitted},
        Execution.VERIFIER_ONLY: _verifier_calls(emitted, emitted),
        Execution.SEQUENTIAL: {
            **_verifier_calls(deferred, deferred),
            Count.DRAFTER_CALLS: by_both,
        },
        Execution.ORACLE: {**_verifier_calls(emitted, deferred), Count.DRAFTER_CALLS: by_both},
    }
    for execution, charged in charges.items():
        for column, values in charged.items():
            counts[:, column] += values * executions[execution]
    return counts


def _verifier_calls(calls: Tensor, deferred: Tensor) -> dict[Count, Tensor]:
    """A sequential verifier call scores one position."""
    return {Count.VERIFIER_CALLS: calls, Count.VERIFIER_TOKENS: calls, Count.DEFERRED: deferred}
