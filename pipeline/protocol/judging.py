"""Judging the pairs that share a `use:` name: all at once, each with its own parameters.

Every strategy is one function of the position: given both distributions and the draws it yields a
token. A verdict walks the block while that token equals the drafted one; the first that differs
replaces the draft and ends the walk. So sequential strategies ride in the same blocks as speculative
ones, emit exactly what they would emit alone, and only their counting differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.protocol.accounting import Walk, count
from pipeline.protocol.blocks import Failure, Origin, Sum, Thought, Verdicts
from pipeline.protocol.distributions import confidence, draw
from pipeline.protocol.positions import Positions
from pipeline.protocol.rounds import Round
from pipeline.protocol.strategies import KINDS, Execution, Kind
from pipeline.protocol.targets import Judgement, Parameters, Target
from pipeline.randomness import Role
from pipeline.records import Strategy


class Group:
    """Pairs of a round with one `use:` name: judged at once, each with its own parameters."""

    def __init__(self, shared: Round, target: Target, rows: Tensor, chosen: list[Strategy]) -> None:
        self.shared, self.target, self.rows = shared, target, rows
        self.kind: Kind = KINDS[chosen[0].use]
        dtype = shared.positions.drafter.peaks.dtype
        thresholds = [vars(strategy)[self.kind.threshold] for strategy in chosen]
        betas = [strategy.beta for strategy in chosen]
        self.given = Parameters(_column(thresholds, dtype, rows), _column(betas, dtype, rows))
        self.num_drafted, self.fell_back = self._block_lengths(chosen)
        self.can_continue = shared.can_continue[rows] | self.fell_back

    def judge(self, trace: bool) -> Verdicts:
        """Walk the block, replace or continue behind the walk, and count."""
        judged = self._compare()
        column = torch.arange(self.shared.columns, device=self.rows.device)
        same = judged.same & (column < self.num_drafted[:, None])
        accepted = same.long().cumprod(dim=1).sum(dim=1)
        replaced = accepted < self.num_drafted
        bonus = ~replaced & self._may_continue()
        failed = self._failed(accepted, replaced, bonus, judged.mass_broken)
        replaced, bonus = replaced & (failed == 0), bonus & (failed == 0)
        looked_at = column < torch.minimum(accepted + 1, self.num_drafted)[:, None]
        walk = Walk(
            num_drafted=self.num_drafted,
            accepted=accepted,
            replaced=replaced.long(),
            bonus=bonus.long(),
            scored=self.num_drafted + self._may_continue(),
            deferred=(judged.deferred & looked_at).sum(dim=1) + (self.fell_back & bonus),
            asked=self.num_drafted + self.fell_back,
        )
        tokens = self._tokens(accepted, replaced, bonus)
        at_token = self._deferred(judged.deferred, accepted, bonus)
        return Verdicts(
            tokens=tokens,
            num_tokens=accepted + walk.replaced + walk.bonus,
            counts=count(self.kind.execution, walk),
            sums=self._sums(judged, looked_at, accepted),
            failed=failed,
            origins=self._origins(accepted, replaced, at_token),
            deferred=at_token,
            thoughts=self._thoughts(tokens) if trace else self._no_thoughts(tokens),
        )

    def _block_lengths(self, chosen: list[Strategy]) -> tuple[Tensor, Tensor]:
        """How many drafted columns each pair's own block has, and whether it fell back. (G,) each."""
        lengths = self.shared.block.num_drafted[self.rows]
        if not self.kind.dynamic:
            return lengths, torch.zeros_like(lengths, dtype=torch.bool)
        peaks = self.shared.confident_columns[self.rows]
        fallback = _column([strategy.fallback for strategy in chosen], peaks.dtype, self.rows)
        confident = (peaks >= fallback).long().cumprod(dim=1).sum(dim=1)
        return torch.minimum(confident, lengths), confident < lengths

    def _compare(self) -> _Judged:
        """Judge the drafted tokens of all pairs."""
        columns = torch.arange(self.shared.columns, device=self.rows.device)
        everyone = torch.arange(len(self.rows), device=self.rows.device)
        if self.target.is_narrow:
            return self._compare_columns(columns, everyone)
        # Wide work at each position: look only at pairs that are still walking.
        judged = _Judged.empty(len(self.rows), len(columns), self.given.alpha)
        walking = everyone
        for column in columns:
            walking = walking[self.num_drafted[walking] > column]
            judged.write(walking, column, self._compare_columns(column[None], walking))
            walking = walking[judged.same[walking, column]]
        return judged

    def _compare_columns(self, columns: Tensor, members: Tensor) -> _Judged:
        shared, rows = self.shared, self.rows[members]
        index = (rows[:, None] * shared.columns + columns).flatten()
        at = shared.positions.take(index)
        judgement = self.target.judge(at, self.given.take(members).repeated(len(columns)))
        shape = (len(rows), len(columns))
        return _Judged(
            same=self._is_own(at, judgement).view(shape),
            deferred=judgement.deferred.view(shape),
            rejection=judgement.rejection.view(shape),
            mass_broken=judgement.mass.isnan().view(shape),
        )

    def _is_own(self, at: Positions, judgement: Judgement) -> Tensor:
        """Whether the drafted token is the strategy's own, (M,)."""
        shared, deferred = self.shared, judgement.deferred[:, 0]
        if self.kind.execution is Execution.SPECULATIVE:
            draws = shared.accept_uniforms.flatten()[at.index]
            return draws * at.drafter_prob_of_draft[:, 0] < judgement.mass[:, 0]
        if self.kind.execution is Execution.DRAFTER_ONLY:
            return ~deferred
        agrees = (shared.verifier_tokens == shared.block.tokens).flatten()[at.index]
        return ~deferred | agrees

    def _may_continue(self) -> Tensor:
        """Whether a block taken whole is followed by one more token of the verifier. (G,) bool."""
        exhausted = self.shared.block.exhausted[self.rows]
        if self.kind.execution is Execution.VERIFIER_ONLY:
            allowed = torch.ones_like(exhausted)
        elif self.kind.execution is Execution.DRAFTER_ONLY:
            allowed = torch.zeros_like(exhausted)
        elif self.kind.execution is Execution.SPECULATIVE:
            setting = self.shared.setting
            whole = self.num_drafted == setting.block_size
            allowed = exhausted | self.fell_back | (whole & (setting.bonus == "verifier"))
        else:
            allowed = exhausted
        scored = self.shared.verifier_logits.shape[1]
        return self.can_continue & allowed & (self.num_drafted < scored)

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
        given, inverse = self.given.take(members), None
        if self.target.is_narrow:
            index, inverse = torch.unique(index, return_inverse=True)
            given = given.take(torch.arange(len(index), device=index.device))
        weights = self.target.residual(shared.positions.take(index), given)
        tokens = draw(weights, shared.residual_uniforms.flatten()[index])
        return tokens if inverse is None else tokens[inverse]

    def _bonus_tokens(self, members: Tensor, columns: Tensor) -> Tensor:
        # A sequential strategy draws every token with the same role, whatever block it falls in.
        speculative = self.kind.execution is Execution.SPECULATIVE
        role = Role.BONUS if speculative else Role.DRAFT
        return self.shared.continue_with(self.rows[members], columns, role)

    def _failed(
        self, accepted: Tensor, replaced: Tensor, bonus: Tensor, mass_broken: Tensor
    ) -> Tensor:
        """Why a pair cannot go on: a model or a target broke where it was needed. (G,)."""
        failed = torch.zeros_like(accepted)
        here = accepted.clamp_max(self.shared.columns - 1)[:, None]
        failed[mass_broken.gather(1, here)[:, 0] & replaced] = Failure.TARGET_INVALID
        if self.kind.uses_verifier:
            broken = self.shared.verifier_broken
            broke = broken[self.rows, accepted.clamp_max(broken.shape[1] - 1)]
            failed[broke & (replaced | bonus)] = Failure.VERIFIER_NAN
        block = self.shared.block
        stuck = (block.num_drafted == 0) & (block.budgets > 0)
        if self.kind.uses_drafter:
            failed[(stuck & ~block.exhausted)[self.rows]] = Failure.DRAFTER_NAN
        if self.kind.execution is Execution.DRAFTER_ONLY:
            failed[(stuck & block.exhausted)[self.rows]] = Failure.DRAFTER_CONTEXT
        return failed

    def _sums(self, judged: _Judged, looked_at: Tensor, accepted: Tensor) -> Tensor:
        """Risk over the positions looked at, and the log confidence of accepted drafts. (G, 3)."""
        sums = torch.zeros(len(self.rows), len(Sum), dtype=torch.float64, device=self.rows.device)
        shape = (self.shared.lanes, self.shared.columns)
        if self.kind.execution is Execution.SPECULATIVE:
            drafter, verifier = self.shared.positions.drafter, self.shared.positions.verifier
            surest = torch.where(
                judged.deferred,
                verifier.peaks.view(shape)[self.rows],
                drafter.peaks.view(shape)[self.rows],
            )
            loss = (1 - surest).double() if self.target.defers else torch.nan
            sums[:, Sum.EXPECTED_REJECTED] = _masked_sum(judged.rejection.double(), looked_at)
            sums[:, Sum.EXPECTED_LOSS] = _masked_sum(loss * torch.ones_like(sums[:, :1]), looked_at)
        if self.kind.execution is Execution.DRAFTER_ONLY:
            column = torch.arange(shape[1], device=self.rows.device)
            logs = self.shared.positions.drafter_confidence_of_draft.double().log().view(shape)
            kept = column < accepted[:, None]
            sums[:, Sum.LOG_CONFIDENCE] = _masked_sum(logs[self.rows], kept)
        return sums

    def _origins(self, accepted: Tensor, replaced: Tensor, deferred: Tensor) -> Tensor:
        """Who wrote each token, (G, D + 1); a sequential strategy knows the two models only."""
        if self.kind.execution is not Execution.SPECULATIVE:
            return torch.where(deferred, int(Origin.VERIFIER), int(Origin.DRAFT))
        last = torch.where(replaced, int(Origin.RESIDUAL), int(Origin.BONUS))
        column = torch.arange(self.shared.columns + 1, device=accepted.device)
        return torch.where(column < accepted[:, None], int(Origin.DRAFT), last[:, None])

    def _deferred(self, deferred: Tensor, accepted: Tensor, bonus: Tensor) -> Tensor:
        """Whether the rule deferred at each token, (G, D + 1); a bonus token is no deferral."""
        wide = torch.cat([deferred, torch.zeros_like(deferred[:, :1])], dim=1)
        column = torch.arange(wide.shape[1], device=wide.device)
        behind = (column == accepted[:, None]) & bonus[:, None]
        sequential = self.kind.execution is not Execution.SPECULATIVE
        return torch.where(behind, (self.fell_back | sequential)[:, None], wide)

    def _thoughts(self, tokens: Tensor) -> Tensor:
        """What both models thought at each token, (G, D + 1, len(Thought)); NaN where not asked."""
        shared, shape = self.shared, tokens.shape
        drafter = confidence(shared.block.drafter_logits)[self.rows]
        verifier = confidence(shared.verifier_logits)[self.rows]
        variation = shared.positions.total_variation.view(shared.lanes, -1)[self.rows]
        thoughts = torch.full((*shape, len(Thought)), torch.nan, device=tokens.device)
        for asked, of_token, largest in (
            (drafter, Thought.DRAFTER_CONFIDENCE, Thought.DRAFTER_MAX),
            (verifier, Thought.VERIFIER_CONFIDENCE, Thought.VERIFIER_MAX),
        ):
            width = asked.shape[1]
            chosen = tokens[:, :width, None]
            thoughts[:, :width, of_token] = asked.gather(2, chosen)[..., 0].float()
            thoughts[:, :width, largest] = asked.amax(dim=-1).float()
        thoughts[:, : variation.shape[1], Thought.TOTAL_VARIATION] = variation.float()
        column = torch.arange(shape[1], device=tokens.device)
        not_asked = column >= shared.block.num_drafted[self.rows, None]
        for name in (Thought.DRAFTER_CONFIDENCE, Thought.DRAFTER_MAX, Thought.TOTAL_VARIATION):
            thoughts[..., name].masked_fill_(not_asked, torch.nan)
        return thoughts

    @staticmethod
    def _no_thoughts(tokens: Tensor) -> Tensor:
        return torch.empty(len(tokens), 0, len(Thought), device=tokens.device)


@dataclass(frozen=True)
class _Judged:
    """What is known of each pair at each drafted column, (G, D) each."""

    same: Tensor
    """Whether the drafted token is the strategy's own."""
    deferred: Tensor
    rejection: Tensor
    """The probability that a draft is rejected there."""
    mass_broken: Tensor
    """Whether the target was no distribution."""

    @classmethod
    def empty(cls, pairs: int, columns: int, like: Tensor) -> _Judged:
        """Nothing judged yet: no token is the strategy's own."""
        no = torch.zeros(pairs, columns, dtype=torch.bool, device=like.device)
        return cls(no, no.clone(), like.new_zeros(pairs, columns), no.clone())

    def write(self, pairs: Tensor, column: Tensor, judged: _Judged) -> None:
        """Fill in one column of some pairs."""
        self.same[pairs, column] = judged.same[:, 0]
        self.deferred[pairs, column] = judged.deferred[:, 0]
        self.rejection[pairs, column] = judged.rejection[:, 0]
        self.mass_broken[pairs, column] = judged.mass_broken[:, 0]


def _masked_sum(values: Tensor, chosen: Tensor) -> Tensor:
    """Sums over the chosen columns; what stands in the others, NaN too, does not count."""
    return torch.where(chosen, values, 0.0).sum(dim=1)


def _column(values: Sequence[float | str | None], dtype: torch.dtype, like: Tensor) -> Tensor:
    """A parameter as a column (G, 1); NaN where a strategy has none, so that misuse shows."""
    numbers = [value if isinstance(value, float | int) else torch.nan for value in values]
    return torch.tensor(numbers, dtype=dtype, device=like.device)[:, None]
