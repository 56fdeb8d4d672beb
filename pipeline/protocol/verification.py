"""One verification: judge a drafted block for every strategy that rides in its lanes.

Index conventions. A block has A lanes (rows) and D drafted columns; column j of row r is the token
drafted for output position `starts[r] + j`. Column j of the verifier's logits speaks about the same
position as column j of the drafter's; with the bonus token of Algorithm 4 the verifier has one
column more. A *pair* is one strategy in one lane; P pairs.

Every strategy is one function of the position: given both distributions and the draws it yields a
token. A verdict walks the block while that token equals the drafted one; the first that differs
replaces the draft and ends the walk. So sequential strategies ride in the same blocks as speculative
ones, emit exactly what they would emit alone, and only their counting differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pipeline.protocol.accounting import Count, Walk, count
from pipeline.protocol.distributions import (
    confidence,
    draw,
    is_broken,
    sampling_distribution,
)
from pipeline.protocol.positions import Distributions, Positions
from pipeline.protocol.strategies import KINDS, Execution, Kind
from pipeline.randomness import Role, uniforms
from pipeline.records import Setting, Strategy

DRAFTER_BROKEN, VERIFIER_BROKEN = 1, 2
"""Codes in `Verdicts.failed`: the model gave NaN or infinite logits where its answer was needed."""


@dataclass(frozen=True)
class Block:
    """A draft block as the verifier sees it. A lanes, D columns, V vocabulary.

    `num_drafted[r]` columns of row r count: a block ends early at the token limit, at a drafted
    end-of-text token and where the drafter is broken. `budgets[r]` is how many tokens the lane may
    still emit. `drafter_logits` are exactly those that the tokens were drawn from.
    """

    tokens: Tensor
    """int64 (A, D)."""
    drafter_logits: Tensor
    """float32 (A, D, V)."""
    num_drafted: Tensor
    """int64 (A,)."""
    budgets: Tensor
    """int64 (A,)."""
    starts: Tensor
    """int64 (A,), the output position of column 0."""
    keys: Tensor
    """int64 (A,), `example_key` of each lane."""
    repeats: Tensor
    """int64 (A,)."""


@dataclass(frozen=True)
class Pairs:
    """The (lane, strategy) pairs of a round: rows into the block, indexes into the strategies. (P,) each."""

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
    failed: Tensor
    """int64 (P,), 0 or the code of the model that broke; the pair ends behind what it had accepted."""


def verify(
    block: Block,
    verifier_logits: Tensor,
    pairs: Pairs,
    strategies: Sequence[Strategy],
    setting: Setting,
) -> Verdicts:
    """Judge a block for all pairs (Algorithm 4 with each pair's own target).

    Args:
        verifier_logits: float32 (A, D, V), or (A, D + 1, V) with the bonus column.
    """
    shared = _Round(block, verifier_logits, setting)
    width = block.tokens.shape[1] + 1
    verdicts = Verdicts(
        tokens=block.tokens.new_zeros(len(pairs.rows), width),
        num_tokens=block.tokens.new_zeros(len(pairs.rows)),
        counts=block.tokens.new_zeros(len(pairs.rows), len(Count)),
        failed=block.tokens.new_zeros(len(pairs.rows)),
    )
    for group, members in _groups(pairs, strategies, shared):
        part = group.judge()
        verdicts.tokens[members] = part.tokens
        verdicts.num_tokens[members] = part.num_tokens
        verdicts.counts[members] = part.counts
        verdicts.failed[members] = part.failed
    return verdicts


class _Round:
    """What all pairs of a block share: distributions, draws, and what follows from them."""

    def __init__(self, block: Block, verifier_logits: Tensor, setting: Setting) -> None:
        self.block, self.setting, self.verifier_logits = block, setting, verifier_logits
        self.lanes, self.columns = block.tokens.shape
        self.positions = Positions(
            Distributions(block.drafter_logits.flatten(0, 1), setting.sampling),
            Distributions(verifier_logits[:, : self.columns].flatten(0, 1), setting.sampling),
            block.tokens.flatten(),
        )

    @cached_property
    def accept_uniforms(self) -> Tensor:
        """(A, D)."""
        return self._uniforms(Role.ACCEPT)

    @cached_property
    def residual_uniforms(self) -> Tensor:
        """(A, D)."""
        return self._uniforms(Role.RESIDUAL)

    @cached_property
    def verifier_tokens(self) -> Tensor:
        """What the verifier itself emits, with the drafter's draws; -1 where it is broken. (A, D)."""
        draws = self._uniforms(Role.DRAFT).flatten()
        tokens = draw(self.positions.verifier.probs, draws).view(self.lanes, self.columns)
        return tokens.masked_fill(self.verifier_broken[:, : self.columns], -1)

    @cached_property
    def verifier_broken(self) -> Tensor:
        """Where the verifier gave no distribution, bool (A, columns of the verifier)."""
        return is_broken(confidence(self.verifier_logits))

    @cached_property
    def can_continue(self) -> Tensor:
        """Whether one more token fits behind the drafted ones: budget left, text not ended. (A,)."""
        block = self.block
        last = (block.num_drafted - 1).clamp_min(0)[:, None]
        eos = block.tokens.new_tensor(self.setting.eos_token_ids)
        ended = torch.isin(block.tokens.gather(1, last)[:, 0], eos) & (block.num_drafted > 0)
        return (block.budgets > block.num_drafted) & ~ended

    def continue_with(self, rows: Tensor, role: Role) -> Tensor:
        """The verifier's token behind the drafted ones, drawn in a role. (R,) to (R,)."""
        block = self.block
        columns = block.num_drafted[rows]
        positions = (block.starts[rows] + columns)[:, None]
        draws = uniforms(self.setting.seed, block.keys[rows], block.repeats[rows], positions, role)
        logits = self.verifier_logits[rows, columns]
        return draw(sampling_distribution(logits, self.setting.sampling), draws[:, 0])

    def _uniforms(self, role: Role) -> Tensor:
        block = self.block
        positions = block.starts[:, None] + torch.arange(self.columns, device=block.starts.device)
        return uniforms(self.setting.seed, block.keys, block.repeats, positions, role)


class _Group:
    """The pairs of a round that share a `use:` name: judged at once, each with its own parameters."""

    def __init__(self, shared: _Round, kind: Kind, rows: Tensor, chosen: list[Strategy]) -> None:
        self.shared, self.kind, self.rows = shared, kind, rows
        self.num_drafted = shared.block.num_drafted[rows]
        self.can_continue = shared.can_continue[rows]
        dtype = shared.positions.drafter.confidences.dtype
        self.alpha = _column([strategy.alpha for strategy in chosen], dtype, rows)
        self.beta = _column([strategy.beta for strategy in chosen], dtype, rows)

    def judge(self) -> Verdicts:
        """Walk the block, replace or continue behind the walk, and count."""
        same, deferred = self._compare()
        column = torch.arange(self.shared.columns, device=self.rows.device)
        same &= column < self.num_drafted[:, None]
        accepted = same.long().cumprod(dim=1).sum(dim=1)
        replaced = accepted < self.num_drafted
        bonus = ~replaced & self._may_continue()
        failed = self._failed(accepted, replaced | bonus)
        replaced, bonus = replaced & (failed == 0), bonus & (failed == 0)
        looked_at = column < torch.minimum(accepted + 1, self.num_drafted)[:, None]
        walk = Walk(
            num_drafted=self.num_drafted,
            accepted=accepted,
            replaced=replaced.long(),
            bonus=bonus.long(),
            scored=self.num_drafted + self._may_continue(),
            deferred=(deferred & looked_at).sum(dim=1),
        )
        return Verdicts(
            tokens=self._tokens(accepted, replaced, bonus),
            num_tokens=accepted + walk.replaced + walk.bonus,
            counts=count(self.kind.execution, walk),
            failed=failed,
        )

    def _compare(self) -> tuple[Tensor, Tensor]:
        """Whether each drafted token is the strategy's own, and whether it deferred. (G, D) each."""
        columns = torch.arange(self.shared.columns, device=self.rows.device)
        if self.kind.target.shared_residual:
            return self._compare_columns(columns)
        # Wide work at each position: look only at pairs that are still walking.
        same = torch.zeros(len(self.rows), len(columns), dtype=torch.bool, device=self.rows.device)
        deferred = torch.zeros_like(same)
        walking = torch.arange(len(self.rows), device=self.rows.device)
        for column in columns:
            walking = walking[self.num_drafted[walking] > column]
            here = self._compare_columns(column[None], walking)
            same[walking, column], deferred[walking, column] = here[0][:, 0], here[1][:, 0]
            walking = walking[same[walking, column]]
        return same, deferred

    def _compare_columns(
        self, columns: Tensor, members: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        shared = self.shared
        rows = self.rows if members is None else self.rows[members]
        alpha = self.alpha if members is None else self.alpha[members]
        index = (rows[:, None] * shared.columns + columns).flatten()
        at = shared.positions.take(index)
        judgement = self.kind.target.judge(at, alpha.repeat_interleave(len(columns), dim=0))
        deferred = judgement.deferred[:, 0]
        if self.kind.execution is Execution.SPECULATIVE:
            draws = shared.accept_uniforms.flatten()[index]
            same = draws * at.drafter_prob_of_draft[:, 0] < judgement.mass[:, 0]
        elif self.kind.execution is Execution.DRAFTER_ONLY:
            same = ~deferred
        else:
            same = ~deferred | (shared.verifier_tokens == shared.block.tokens).flatten()[index]
        shape = (len(rows), len(columns))
        return same.view(shape), deferred.view(shape)

    def _may_continue(self) -> Tensor:
        """Whether a block taken whole is followed by one more token of the verifier. (G,) bool."""
        if self.kind.execution is Execution.VERIFIER_ONLY:
            return self.can_continue & (self.num_drafted < self.shared.verifier_logits.shape[1])
        if self.kind.execution is not Execution.SPECULATIVE:
            return torch.zeros_like(self.can_continue)
        setting = self.shared.setting
        whole = self.num_drafted == setting.block_size
        return self.can_continue & whole & (setting.bonus == "verifier")

    def _tokens(self, accepted: Tensor, replaced: Tensor, bonus: Tensor) -> Tensor:
        """The accepted drafted tokens and the one behind them, then zeros. (G, D + 1)."""
        drafted = self.shared.block.tokens[self.rows]
        tokens = torch.cat([drafted, torch.zeros_like(drafted[:, :1])], dim=1)
        column = torch.arange(tokens.shape[1], device=tokens.device)
        tokens *= column < accepted[:, None]
        for chosen, drawn in ((replaced, self._replacements), (bonus, self._bonus_tokens)):
            members = chosen.nonzero()[:, 0]
            if len(members):
                tokens[members, accepted[members]] = drawn(members, accepted[members])
        return tokens

    def _replacements(self, members: Tensor, columns: Tensor) -> Tensor:
        shared = self.shared
        index = self.rows[members] * shared.columns + columns
        if self.kind.execution is not Execution.SPECULATIVE:
            return shared.verifier_tokens.flatten()[index]
        alpha, beta = self.alpha[members], self.beta[members]
        inverse = None
        if self.kind.target.shared_residual:
            index, inverse = torch.unique(index, return_inverse=True)
            alpha, beta = alpha[: len(index)], beta[: len(index)]
        weights = self.kind.target.residual(shared.positions.take(index), alpha, beta)
        tokens = draw(weights, shared.residual_uniforms.flatten()[index])
        return tokens if inverse is None else tokens[inverse]

    def _bonus_tokens(self, members: Tensor, columns: Tensor) -> Tensor:
        # The verifier alone draws every token with the same role, whatever block it falls in.
        alone = self.kind.execution is Execution.VERIFIER_ONLY
        return self.shared.continue_with(self.rows[members], Role.DRAFT if alone else Role.BONUS)

    def _failed(self, accepted: Tensor, drew: Tensor) -> Tensor:
        """Which model broke where the pair needed it. (G,)."""
        failed = torch.zeros_like(accepted)
        if self.kind.uses_verifier:
            broken = self.shared.verifier_broken
            here = broken[self.rows, accepted.clamp_max(broken.shape[1] - 1)]
            failed[here & drew] = VERIFIER_BROKEN
        if self.kind.uses_drafter:
            failed[(self.num_drafted == 0) & (self.shared.block.budgets[self.rows] > 0)] = (
                DRAFTER_BROKEN
            )
        return failed


def _groups(
    pairs: Pairs, strategies: Sequence[Strategy], shared: _Round
) -> Iterator[tuple[_Group, Tensor]]:
    chosen = [strategies[index] for index in pairs.strategies.tolist()]
    by_use: dict[str, list[int]] = {}
    for pair, strategy in enumerate(chosen):
        by_use.setdefault(strategy.use, []).append(pair)
    for use, members in by_use.items():
        index = torch.tensor(members, device=pairs.rows.device)
        group = [chosen[pair] for pair in members]
        yield _Group(shared, KINDS[use], pairs.rows[index], group), index


def _column(values: Sequence[float | str | None], dtype: torch.dtype, like: Tensor) -> Tensor:
    """A parameter as a column (G, 1); NaN where a strategy has none, so that misuse shows."""
    numbers = [value if isinstance(value, float | int) else torch.nan for value in values]
    return torch.tensor(numbers, dtype=dtype, device=like.device)[:, None]
