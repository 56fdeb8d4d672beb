"""Drafting one block: token by token, for all lanes of a bank.

A verifier that no drafter works for drafts too: it then judges its own block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.models.interface import ModelBank
from pipeline.protocol.blocks import Block
from pipeline.protocol.distributions import is_broken
from pipeline.protocol.positions import Distributions
from pipeline.randomness import Role, uniforms
from pipeline.records import Sampling
from pipeline.workers.transport import Transport, as_tensor, rounded
from pipeline.workers.wire import Ints


@dataclass(frozen=True)
class Places:
    """Where the blocks of the first A slots go. (A,) each; free slots among them idle along."""

    starts: Ints
    """The output position of each block's first token."""
    budgets: Ints
    """How many tokens each lane may still write; 0 where none is held."""
    keys: Ints
    repeats: Ints

    def draws(self, seed: int, columns: int, device: torch.device) -> Tensor:
        """The uniforms that the block is drawn with, (A, D)."""
        here = torch.device("cpu")
        keys, repeats = as_tensor(self.keys, here), as_tensor(self.repeats, here)
        positions = torch.from_numpy(self.starts[:, None] + np.arange(columns))
        return uniforms(seed, keys, repeats, positions, Role.DRAFT).to(device)


@dataclass(frozen=True)
class Ending:
    """Where the block of each lane ends and why; see `Block`. (A,) each."""

    num_drafted: Tensor
    ended: Tensor
    exhausted: Tensor


def draft_block(
    cache: ModelBank,
    last_tokens: Ints,
    starts: Ints,
    draws: Tensor,
    sampling: Sampling,
    transport: Transport = "float32",
) -> tuple[Tensor, Tensor]:
    """Draft token by token.

    Args:
        last_tokens: int64 (A, L), what each lane wrote last: all that its cache may lack. A drafter
            lacks two tokens behind a block taken whole, a verifier one.
        draws: float64 (A, D).

    Returns:
        Logits (A, D, V) and the tokens (A, D) drawn from them.
    """
    fed = as_tensor(last_tokens, cache.device)
    offsets = starts - last_tokens.shape[1]
    logits, tokens = [], []
    for column in range(draws.shape[1]):
        logits.append(rounded(transport, cache.feed(fed, offsets, keep=1)[:, 0]))
        tokens.append(Distributions(logits[-1], sampling).draw(draws[:, column]))
        fed, offsets = tokens[-1][:, None], starts + column
    return torch.stack(logits, dim=1), torch.stack(tokens, dim=1)


def ending(logits: Tensor, ends_text: Tensor, budgets: Ints, room: Ints) -> Ending:
    """A block ends at the budget, the end of the text, a broken drafter, its full context.

    Args:
        ends_text: bool (A, D), whether each drafted token ends the text.
        room: how many tokens each lane's drafter can still draft, (A,).
    """
    columns, device = ends_text.shape[1], ends_text.device
    behind_end, broken = _first(ends_text) + 1, _first(is_broken(logits))
    budget, full = (as_tensor(values, device) for values in (budgets, room))
    limits = torch.stack([behind_end, broken, budget, full])
    num_drafted = limits.amin(dim=0).clamp_max(columns)
    return Ending(num_drafted, num_drafted == behind_end, num_drafted == full)


def own_block(logits: Tensor, tokens: Tensor, ends: Ending, places: Places) -> Block:
    """The block of a model that works alone, to be judged where it was drafted."""
    device = tokens.device
    starts, budgets, keys, repeats = (as_tensor(values, device) for values in vars(places).values())
    return Block(
        tokens=tokens,
        drafter_logits=logits,
        num_drafted=ends.num_drafted,
        ended=ends.ended,
        exhausted=ends.exhausted,
        budgets=budgets,
        starts=starts,
        keys=keys,
        repeats=repeats,
    )


def _first(flags: Tensor) -> Tensor:
    """Index of the first True of each row, the row's length where there is none. (A, D) to (A,)."""
    return (~flags).long().cumprod(dim=1).sum(dim=1)
