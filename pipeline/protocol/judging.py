"""Judging all pairs of a round at once, each with its own target and parameters.

Every strategy is one function of the position: given both distributions and the draws it yields a
token. A verdict walks the block while that token equals the drafted one; the first that differs
replaces the draft and ends the walk. So sequential strategies ride in the same blocks as speculative
ones, emit exactly what they would emit alone, and only their counting differs.

Only the first step, whether a drafted token is a strategy's own, is done target by target; from
there on all pairs go together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.protocol.accounting import Walk, count
from pipeline.protocol.blocks import Failure, Origin, Pairs, Sum, Thought, Verdicts
from pipeline.protocol.distributions import confidence, draw
from pipeline.protocol.lineup import EXECUTIONS, Lineup
from pipeline.protocol.rounds import Round
from pipeline.protocol.strategies import Execution
from pipeline.protocol.targets import Parameters, Target, residual_of_verifier
from pipeline.randomness import Role


class Judging:
    """The verdicts of P pairs; D drafted columns."""

    def __init__(self, shared: Round, pairs: Pairs, lineup: Lineup) -> None:
        self.shared, self.lineup, self.rows = shared, lineup, pairs.rows
        self.strategies = pairs.strategies
        self.given = Parameters(
            lineup.thresholds[self.strategies, None], lineup.betas[self.strategies, None]
        )
        self.groups = lineup.groups[self.strategies]
        executions = lineup.executions[self.strategies]
        self.executions = {e: executions == number for e, number in EXECUTIONS.items()}
        self.is_speculative = self.executions[Execution.SPECULATIVE]
        self.column = torch.arange(shared.columns, device=self.rows.device)
        self.num_drafted = shared.block.num_drafted[self.rows]
        self.fell_back = torch.zeros_like(self.is_speculative)
        if lineup.is_dynamic:
            self._end_where_unsure()
        self.can_continue = shared.can_continue[self.rows] | self.fell_back

    def verdicts(self, trace: bool) -> Verdicts:
        """Walk the block, replace or continue behind the walk, and count."""
        judged = self._judge()
        same = judged.same & (self.column < self.num_drafted[:, None])
        accepted = same.long().cumprod(dim=1).sum(dim=1)
        replaced = accepted < self.num_drafted
        may_continue = self._may_continue()
        bonus = ~replaced & may_continue
        failed = self._failed(accepted, replaced, bonus, judged.mass_broken)
        replaced, bonus = replaced & (failed == 0), bonus & (failed == 0)
        looked_at = self.column < torch.minimum(accepted + 1, self.num_drafted)[:, None]
        walk = Walk(
            num_drafted=self.num_drafted,
            accepted=accepted,
            replaced=replaced.long(),
            bonus=bonus.long(),
            scored=self.num_drafted + may_continue,
            deferred=(judged.deferred & looked_at).sum(dim=1) + (self.fell_back & bonus),
            asked=self.num_drafted + self.fell_back,
        )
        tokens = self._tokens(accepted, replaced, bonus)
        at_token = self._deferred(judged.deferred, accepted, bonus)
        return Verdicts(
            tokens=tokens,
            num_tokens=accepted + walk.replaced + walk.bonus,
            counts=count(self.executions, walk),
            sums=self._sums(judged, looked_at, accepted),
            failed=failed,
            origins=self._origins(accepted, replaced, at_token),
            deferred=at_token,
            thoughts=self._thoughts(tokens) if trace else self._no_thoughts(tokens),
        )

    def _end_where_unsure(self) -> None:
        """A dynamic block ends before the first token that the drafter is less sure of."""
        peaks = self.shared.positions.drafter.peaks.view(self.shared.lanes, -1)[self.rows]
        sure = peaks >= self.lineup.fallbacks[self.strategies, None]
        confident = sure.long().cumprod(dim=1).sum(dim=1)
        self.fell_back = confident < self.num_drafted
        self.num_drafted = torch.minimum(confident, self.num_drafted)

    # --- is the drafted token the strategy's own? ---------------------------------------------------

    def _judge(self) -> _Judged:
        judged = _Judged.empty(len(self.rows), len(self.column), self.given.alpha)
        for number, target in enumerate(self.lineup.targets):
            members = (self.groups == number).nonzero()[:, 0]
            if not len(members):
                continue
            execution = self.lineup.kinds[number].execution
            if target.is_narrow:
                self._judge_columns(judged, target, execution, members, self.column)
                continue
            # Wide work at each position: look only at pairs that are still walking.
            for column in self.column:
                members = members[self.num_drafted[members] > column]
                self._judge_columns(judged, target, execution, members, column[None])
                members = members[judged.same[members, column]]
        return judged

    def _judge_columns(
        self,
        judged: _Judged,
        target: Target,
        execution: Execution,
        members: Tensor,
        columns: Tensor,
    ) -> None:
        index = (self.rows[members, None] * self.shared.columns + columns).flatten()
        at = self.shared.positions.take(index)
        judgement = target.judge(at, self.given.take(members).repeated(len(columns)))
        place, shape = (members[:, None], columns), (len(members), len(columns))
        judged.deferred[place] = judgement.deferred.view(shape)
        judged.rejection[place] = judgement.rejection.view(shape)
        judged.mass_broken[place] = judgement.mass.isnan().view(shape)
        kept = ~judgement.deferred[:, 0]
        if execution is Execution.SPECULATIVE:
            draws = self.shared.draws(Role.ACCEPT).flatten()[index]
            same = draws * at.drafter_prob_of_draft[:, 0] < judgement.mass[:, 0]
        elif execution is Execution.DRAFTER_ONLY:
            same = kept
        else:
            agrees = self.shared.verifier_tokens == self.shared.block.tokens
            same = kept | agrees.flatten()[index]
        judged.same[place] = same.view(shape)

    # --- the token behind the accepted ones ---------------------------------------------------------

    def _may_continue(self) -> Tensor:
        """Whether a block taken whole is followed by one more token of the verifier. (P,) bool."""
        allowed = self.shared.block.exhausted[self.rows]
        if self.shared.setting.bonus == "verifier":
            whole = self.num_drafted == self.shared.setting.block_size
            allowed = allowed | (self.is_speculative & whole)
        allowed = allowed | self.fell_back | self.executions[Execution.VERIFIER_ONLY]
        allowed = allowed & ~self.executions[Execution.DRAFTER_ONLY]
        return self.can_continue & allowed & (self.num_drafted < self._scored_columns)

    @property
    def _scored_columns(self) -> int:
        return self.shared.verifier_logits.shape[1]

    def _tokens(self, accepted: Tensor, replaced: Tensor, bonus: Tensor) -> Tensor:
        """The accepted drafted tokens and the one behind them, then zeros. (P, D + 1)."""
        drafted = self.shared.block.tokens[self.rows]
        tokens = torch.cat([drafted, torch.zeros_like(drafted[:, :1])], dim=1)
        tokens *= torch.arange(tokens.shape[1], device=tokens.device) < accepted[:, None]
        for members, drawn in (
            ((replaced & ~self.is_speculative).nonzero()[:, 0], self._sequential_replacements),
            ((replaced & self.is_speculative).nonzero()[:, 0], self._residual_tokens),
            (bonus.nonzero()[:, 0], self._bonus_tokens),
        ):
            if len(members):
                tokens[members, accepted[members]] = drawn(members, accepted[members])
        return tokens

    def _sequential_replacements(self, members: Tensor, columns: Tensor) -> Tensor:
        return self.shared.verifier_tokens[self.rows[members], columns]

    def _residual_tokens(self, members: Tensor, columns: Tensor) -> Tensor:
        index = self.rows[members] * self.shared.columns + columns
        if all(target.is_narrow for target in self.lineup.targets):
            return self._verifier_residual_tokens(index)
        tokens = torch.empty_like(index)
        for number, target in enumerate(self.lineup.targets):
            mine = (self.groups[members] == number).nonzero()[:, 0]
            if not len(mine):
                continue
            if target.is_narrow:
                tokens[mine] = self._verifier_residual_tokens(index[mine])
            else:
                at = self.shared.positions.take(index[mine])
                weights = target.residual(at, self.given.take(members[mine]))
                tokens[mine] = draw(
                    weights, self.shared.draws(Role.RESIDUAL).flatten()[index[mine]]
                )
        return tokens

    def _verifier_residual_tokens(self, index: Tensor) -> Tensor:
        """Drawn from norm(max(0, p - q)), once a position however many pairs were rejected there."""
        if self.shared.positions.verifier.is_greedy:
            return self.shared.positions.verifier.modes[index, 0]
        index, inverse = torch.unique(index, return_inverse=True)
        weights = residual_of_verifier(self.shared.positions.take(index))
        return draw(weights, self.shared.draws(Role.RESIDUAL).flatten()[index])[inverse]

    def _bonus_tokens(self, members: Tensor, columns: Tensor) -> Tensor:
        # A sequential strategy draws every token with the same role, whatever block it falls in.
        speculative = self.is_speculative[members]
        roles = torch.where(speculative, int(Role.BONUS), int(Role.DRAFT))
        rows, inverse = torch.unique(
            torch.stack([self.rows[members], columns, roles]), dim=1, return_inverse=True
        )
        return self.shared.continue_with(*rows)[inverse]

    def _failed(
        self, accepted: Tensor, replaced: Tensor, bonus: Tensor, mass_broken: Tensor
    ) -> Tensor:
        """Why a pair cannot go on: a model or a target broke where it was needed. (P,)."""
        shared, block = self.shared, self.shared.block
        here = accepted.clamp_max(shared.columns - 1)[:, None]
        drafter_only = self.executions[Execution.DRAFTER_ONLY]
        broken = shared.verifier_broken
        broke = broken[self.rows, accepted.clamp_max(broken.shape[1] - 1)]
        stuck = ((block.num_drafted == 0) & (block.budgets > 0))[self.rows]
        exhausted = block.exhausted[self.rows]
        failed = torch.zeros_like(accepted)
        for failure, where in (
            (Failure.TARGET_INVALID, mass_broken.gather(1, here)[:, 0] & replaced),
            (Failure.VERIFIER_NAN, broke & (replaced | bonus) & ~drafter_only),
            (
                Failure.DRAFTER_NAN,
                stuck & ~exhausted & ~self.executions[Execution.VERIFIER_ONLY],
            ),
            (Failure.DRAFTER_CONTEXT, stuck & exhausted & drafter_only),
        ):
            failed = torch.where(where, int(failure), failed)
        return failed

    # --- what is recorded ---------------------------------------------------------------------------

    def _sums(self, judged: _Judged, looked_at: Tensor, accepted: Tensor) -> Tensor:
        """Risk over the positions looked at, and the log confidence of accepted drafts. (P, 3)."""
        sums = torch.zeros(len(self.rows), len(Sum), dtype=torch.float64, device=self.rows.device)
        shape = (self.shared.lanes, self.shared.columns)
        positions = self.shared.positions
        if Execution.SPECULATIVE in self.lineup.has:
            surest = torch.where(
                judged.deferred,
                positions.verifier.peaks.view(shape)[self.rows],
                positions.drafter.peaks.view(shape)[self.rows],
            )
            counted = looked_at & self.is_speculative[:, None]
            loss = (1 - surest).double()
            sums[:, Sum.EXPECTED_REJECTED] = _masked_sum(judged.rejection.double(), counted)
            sums[:, Sum.EXPECTED_LOSS] = _masked_sum(loss, counted)
            choiceless = self.is_speculative & ~self.lineup.defers[self.strategies]
            sums[:, Sum.EXPECTED_LOSS].masked_fill_(choiceless, torch.nan)
        if Execution.DRAFTER_ONLY in self.lineup.has:
            logs = positions.drafter_confidence_of_draft.double().log().view(shape)
            kept = (self.column < accepted[:, None]) & self.executions[Execution.DRAFTER_ONLY][
                :, None
            ]
            sums[:, Sum.LOG_CONFIDENCE] = _masked_sum(logs[self.rows], kept)
        return sums

    def _origins(self, accepted: Tensor, replaced: Tensor, deferred: Tensor) -> Tensor:
        """Who wrote each token, (P, D + 1); a sequential strategy knows the two models only."""
        sequential = torch.where(deferred, int(Origin.VERIFIER), int(Origin.DRAFT))
        last = torch.where(replaced, int(Origin.RESIDUAL), int(Origin.BONUS))
        column = torch.arange(self.shared.columns + 1, device=accepted.device)
        speculative = torch.where(column < accepted[:, None], int(Origin.DRAFT), last[:, None])
        return torch.where(self.is_speculative[:, None], speculative, sequential)

    def _deferred(self, deferred: Tensor, accepted: Tensor, bonus: Tensor) -> Tensor:
        """Whether the rule deferred at each token, (P, D + 1); a bonus token is no deferral."""
        wide = torch.cat([deferred, torch.zeros_like(deferred[:, :1])], dim=1)
        column = torch.arange(wide.shape[1], device=wide.device)
        behind = (column == accepted[:, None]) & bonus[:, None]
        return torch.where(behind, (self.fell_back | ~self.is_speculative)[:, None], wide)

    def _thoughts(self, tokens: Tensor) -> Tensor:
        """What both models thought at each token, (P, D + 1, len(Thought)); NaN where not asked."""
        shared, shape = self.shared, tokens.shape
        assert shared.block.drafter_logits is not None, "a trace has the drafter's logits shipped"
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
    """What is known of each pair at each drafted column, (P, D) each."""

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


def _masked_sum(values: Tensor, chosen: Tensor) -> Tensor:
    """Sums over the chosen columns; what stands in the others, NaN too, does not count."""
    return torch.where(chosen, values, 0.0).sum(dim=1)
