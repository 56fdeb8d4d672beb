"""What all pairs of a block share: computed once a round, and only when somebody asks."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from pipeline.protocol.blocks import Block
from pipeline.protocol.distributions import draw, is_broken, sampling_distribution
from pipeline.protocol.positions import Distributions, Positions, ShippedDistributions
from pipeline.randomness import Role, uniforms
from pipeline.records import Setting


class Round:
    """Distributions and draws of a block, and what follows from them."""

    def __init__(self, block: Block, verifier_logits: Tensor, setting: Setting) -> None:
        self.block, self.setting, self.verifier_logits = block, setting, verifier_logits
        self.lanes, self.columns = block.tokens.shape
        self.positions = Positions(
            _drafter(block, setting),
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
        return is_broken(self.verifier_logits)

    @cached_property
    def can_continue(self) -> Tensor:
        """Whether one more token fits behind the drafted ones: budget left, text not ended. (A,)."""
        return (self.block.budgets > self.block.num_drafted) & ~self.block.ended

    @cached_property
    def confident_columns(self) -> Tensor:
        """Each column's largest drafter confidence. (A, D)."""
        return self.positions.drafter.peaks.view(self.lanes, self.columns)

    def continue_with(self, rows: Tensor, columns: Tensor, role: Role) -> Tensor:
        """The verifier's tokens at given columns of given rows, drawn in a role. (R,) to (R,)."""
        block, positions = self.block, (self.block.starts[rows] + columns)[:, None]
        draws = uniforms(self.setting.seed, block.keys[rows], block.repeats[rows], positions, role)
        logits = self.verifier_logits[rows, columns]
        return draw(sampling_distribution(logits, self.setting.sampling), draws[:, 0])

    def _uniforms(self, role: Role) -> Tensor:
        block = self.block
        positions = block.starts[:, None] + torch.arange(self.columns, device=block.starts.device)
        return uniforms(self.setting.seed, block.keys, block.repeats, positions, role)


def _drafter(block: Block, setting: Setting) -> Distributions:
    logits = block.drafter_logits.flatten(0, 1)
    if block.facts is None:
        return Distributions(logits, setting.drafting)
    return ShippedDistributions(logits, setting.drafting, block.facts)
