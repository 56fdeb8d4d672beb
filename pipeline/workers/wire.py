"""What crosses between a drafter and a verifier: numpy arrays and integers, never torch tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.models.interface import SlotContent
from pipeline.protocol.blocks import Block, Pairs, Verdicts
from pipeline.workers.transport import Packed, as_tensor, unpack

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class VerifyRequest:
    """One round of one bank. Arrays are those of `Block` and `Pairs`; A lanes, D columns.

    Without a `draft` no drafter works for these lanes: the verifier draws up to `columns` tokens itself.
    `last_tokens` is what each lane emitted last, int64 (A,); a lane that emitted nothing is at
    `starts` 0 and the verifier takes the last token of its own prefix.
    """

    bank: str
    setting: int
    """Index into the run's settings; all lanes of a round share it."""
    slots: int
    round: int
    fresh: bool
    """Whether the verifier must forget what it holds of the bank: every lane is among the openings."""
    openings: tuple[SlotContent, ...]
    """Lanes that take slots."""
    columns: int
    last_tokens: Ints
    tokens: Ints
    draft: Packed | None
    num_drafted: Ints
    ended: Bools
    exhausted: Bools
    budgets: Ints
    starts: Ints
    keys: Ints
    repeats: Ints
    pair_rows: Ints
    pair_strategies: Ints

    @property
    def num_lanes(self) -> int:
        """Lanes that are decoded; free slots between them idle along."""
        return int(np.count_nonzero(self.budgets))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (value for value in vars(self).values() if isinstance(value, np.ndarray | Packed))
        return sum(array.nbytes for array in arrays)

    def block(self, device: torch.device, vocabulary: int) -> Block:
        """The draft block on the verifier's device."""
        assert self.draft is not None
        tokens = as_tensor(self.tokens, device)
        logits, facts = unpack(self.draft, tokens, vocabulary)
        return Block(
            tokens=tokens,
            drafter_logits=logits,
            facts=facts,
            num_drafted=as_tensor(self.num_drafted, device),
            ended=as_tensor(self.ended, device),
            exhausted=as_tensor(self.exhausted, device),
            budgets=as_tensor(self.budgets, device),
            starts=as_tensor(self.starts, device),
            keys=as_tensor(self.keys, device),
            repeats=as_tensor(self.repeats, device),
        )

    def pairs(self, device: torch.device) -> Pairs:
        """The (lane, strategy) pairs on the verifier's device."""
        return Pairs(as_tensor(self.pair_rows, device), as_tensor(self.pair_strategies, device))


@dataclass(frozen=True)
class VerifyReply:
    """The verdicts of a round, one row a pair, in the order of the request's pairs. See `Verdicts`."""

    round: int
    tokens: Ints
    num_tokens: Ints
    counts: Ints
    sums: Doubles
    failed: Ints
    origins: Ints
    deferred: Bools
    thoughts: Floats
    queue_seconds: float = 0.0
    """How long the request waited for the verifier."""
    busy_seconds: float = 0.0
    """How long the verifier worked on it."""

    @classmethod
    def of(cls, round_number: int, verdicts: Verdicts) -> VerifyReply:
        """Pack verdicts for the way back."""
        arrays = {name: tensor.cpu().numpy() for name, tensor in vars(verdicts).items()}
        return cls(round=round_number, **arrays)
