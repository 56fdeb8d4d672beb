"""What goes into a verification and what comes out of it.

Index conventions. A block has A lanes (rows) and D drafted columns; column j of row r is the token
drafted for output position `starts[r] + j`. Column j of the verifier's logits speaks about the same
position as column j of the drafter's; with the bonus token of Algorithm 4 the verifier has one
column more. A *pair* is one strategy in one lane; P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class Failure(IntEnum):
    """Why a pair cannot go on; the values of `Verdicts.failed`."""

    NONE = 0
    DRAFTER_NAN = 1
    VERIFIER_NAN = 2
    DRAFTER_CONTEXT = 3
    TARGET_INVALID = 4


class Sum(IntEnum):
    """The columns of `Verdicts.sums`."""

    EXPECTED_REJECTED = 0
    EXPECTED_LOSS = 1
    LOG_CONFIDENCE = 2


class Origin(IntEnum):
    """Who wrote a token: its position in `Verdicts.origins`."""

    DRAFT = 0
    RESIDUAL = 1
    BONUS = 2
    VERIFIER = 3


class Thought(IntEnum):
    """The columns of `Verdicts.thoughts`: what the models thought where a token was written."""

    DRAFTER_CONFIDENCE = 0
    VERIFIER_CONFIDENCE = 1
    DRAFTER_MAX = 2
    VERIFIER_MAX = 3
    TOTAL_VARIATION = 4


@dataclass(frozen=True)
class DrafterFacts:
    """What rules read of the drafter's confidences, where its logits were not shipped whole. (A, D) each."""

    peaks: Tensor
    """The largest confidence."""
    entropies: Tensor
    """In nats."""
    of_draft: Tensor
    """The confidence in the drafted token."""


@dataclass(frozen=True)
class Block:
    """A draft block as the verifier sees it. A lanes, D columns, V vocabulary.

    `num_drafted[r]` columns of row r count: a block ends early at the token limit, behind a token
    that ends the text, where the drafter is broken and where its context is full. `budgets[r]` is
    how many tokens the lane may still emit. `drafter_logits` are exactly those that the tokens were
    drawn from.
    """

    tokens: Tensor
    """int64 (A, D)."""
    drafter_logits: Tensor | None
    """float32 (A, D, V); None where the drafts are greedy and `facts` are given."""
    num_drafted: Tensor
    """int64 (A,)."""
    ended: Tensor
    """bool (A,), whether the last drafted token ends the text."""
    exhausted: Tensor
    """bool (A,), whether the drafter's context is full behind the drafted tokens."""
    budgets: Tensor
    """int64 (A,)."""
    starts: Tensor
    """int64 (A,), the output position of column 0."""
    keys: Tensor
    """int64 (A,), `example_key` of each lane."""
    repeats: Tensor
    """int64 (A,)."""
    facts: DrafterFacts | None = None
    """Given where `drafter_logits` hold the support of the sampling distribution alone."""


@dataclass(frozen=True)
class Pairs:
    """The (lane, strategy) pairs of a round: rows of the block, indexes of strategies. (P,) each."""

    rows: Tensor
    strategies: Tensor


@dataclass(frozen=True)
class Verdicts:
    """What a verification says for each pair: tokens to append and what they count as."""

    tokens: Tensor
    """int64 (P, D + 1); row i holds `num_tokens[i]` tokens, then zeros."""
    num_tokens: Tensor
    """int64 (P,)."""
    counts: Tensor
    """int64 (P, len(Count)), what this round adds to the strategy's counts."""
    sums: Tensor
    """float64 (P, len(Sum)), what it adds to the outcome's risk and log confidence."""
    failed: Tensor
    """int64 (P,), a `Failure`; such a pair ends behind what it had accepted."""
    origins: Tensor
    """int64 (P, D + 1), an `Origin` for each token."""
    deferred: Tensor
    """bool (P, D + 1), whether the rule deferred at each token."""
    thoughts: Tensor
    """float32 (P, D + 1, len(Thought)), NaN where unknown; (P, 0, ...) where no trace is kept."""
