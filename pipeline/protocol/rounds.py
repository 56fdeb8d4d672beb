"""What all pairs of a block share: computed once a round, and only when somebody asks."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from pipeline.protocol.blocks import Block
from pipeline.protocol.distributions import is_broken
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

    def draws(self, role: Role) -> Tensor:
        """The uniforms of a role at the drafted columns, (A, D)."""
        return self._draws[int(role)]

    @cached_property
    def _draws(self) -> Tensor:
        """All roles at once, (roles, A, D)."""
        block, roles = self.block, torch.tensor(list(Role), device=self.block.starts.device)
        columns = torch.arange(self.columns, device=roles.device)
        positions = (block.starts[:, None] + columns).repeat(1, len(roles))
        of_column = roles.repeat_interleave(self.columns)
        draws = uniforms(self.setting.seed, block.keys, block.repeats, positions, of_column)
        return draws.view(self.lanes, len(roles), self.columns).transpose(0, 1)

    @cached_property
    def verifier_tokens(self) -> Tensor:
        """What the verifier itself emits, with the drafter's draws; -1 where it is broken. (A, D)."""
        draws = self.draws(Role.DRAFT).flatten()
        tokens = self.positions.verifier.draw(draws).view(self.lanes, self.columns)
        return tokens.masked_fill(self.verifier_broken[:, : self.columns], -1)

    @cached_property
    def verifier_broken(self) -> Tensor:
        """Where the verifier gave no distribution, bool (A, columns of the verifier)."""
        return is_broken(self.verifier_logits)

    @cached_property
    def can_continue(self) -> Tensor:
        """Whether one more token fits behind the drafted ones: budget left, text not ended. (A,)."""
        return (self.block.budgets > self.block.num_drafted) & ~self.block.ended

    def continue_with(self, rows: Tensor, columns: Tensor, roles: Tensor) -> Tensor:
        """The verifier's tokens at given columns of given rows, drawn in given roles. (R,) to (R,)."""
        block, positions = self.block, (self.block.starts[rows] + columns)[:, None]
        keys, repeats = block.keys[rows], block.repeats[rows]
        draws = uniforms(self.setting.seed, keys, repeats, positions, roles[:, None])
        logits = self.verifier_logits[rows, columns]
        return Distributions(logits, self.setting.sampling).draw(draws[:, 0])


def _drafter(block: Block, setting: Setting) -> Distributions:
    logits = None if block.drafter_logits is None else block.drafter_logits.flatten(0, 1)
    if block.facts is not None:
        return ShippedDistributions(block.tokens.flatten(), logits, setting.drafting, block.facts)
    assert logits is not None
    return Distributions(logits, setting.drafting)
