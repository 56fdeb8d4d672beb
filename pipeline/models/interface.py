"""What the protocol needs of a language model, whatever its family.

A model hands out *banks*: caches of a fixed number of slots that go through a round together. Slot s
holds one lane; cache column c of a slot holds absolute position c. So accepting a different number
of tokens in every lane needs no rollback at all: stale columns stand behind the causal mask until
they are written again.

Offsets count from the first output token: offset 0 is output token 0, offset -1 the last token of
the decoder's prefix (the prompt of a decoder-only model, the start token of an encoder-decoder).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_UNLIMITED = 2**31


@dataclass(frozen=True)
class SlotContent:
    """What a slot is to hold: the truth a cache is rebuilt from."""

    slot: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int] = ()


class ModelBank(ABC):
    """The caches of one bank of one model."""

    def __init__(self, slots: int, device: torch.device, context: int | None = None) -> None:
        self.slots = slots
        self.device = device
        self._last_position = None if context is None else context - 1
        self._prefix_lengths = torch.ones(slots, dtype=torch.long, device=device)
        self._prefix_tails = torch.zeros(slots, 2, dtype=torch.long, device=device)

    def open(self, contents: Sequence[SlotContent]) -> None:
        """Fill slots from prompts and the tokens written so far, whatever they held before."""
        for content in contents:
            prefix = self._prefix(content.prompt_ids)
            self._prefix_lengths[content.slot] = len(prefix)
            tail = [prefix[max(0, len(prefix) - 2)], prefix[-1]]
            self._prefix_tails[content.slot] = torch.tensor(tail, device=self.device)
        if contents:
            self._prefill(contents)

    def room(self, content: SlotContent) -> int:
        """How many more tokens can be drawn for a slot before the context is full, at least 0."""
        if self._last_position is None:
            return _UNLIMITED
        written = len(self._prefix(content.prompt_ids)) + len(content.output_ids)
        return max(0, self._last_position + 2 - written)

    def feed(self, tokens: Tensor, offsets: Tensor, keep: int) -> Tensor:
        """Feed Q tokens to each of the first A slots and say what comes behind the last `keep`.

        Args:
            tokens: int64 (A, Q); where the offset is negative the slot's own prefix is used instead.
            offsets: int64 (A, Q), consecutive in each row.
            keep: how many of the Q columns need logits.

        Returns:
            float32 (A, keep, V); column k speaks about the token behind the k-th kept one.
        """
        rows = slice(0, len(tokens))
        tail = self._prefix_tails[rows].gather(1, (offsets + 2).clamp(0, 1))
        tokens = torch.where(offsets < 0, tail, tokens)
        # A prefix of one token has no second last: both columns are then position 0, the same token.
        positions = self._prefix_lengths[rows, None] + offsets
        # Columns of a lane that is at its end do not count, but must be somewhere.
        positions = positions.clamp(0, self._last_position)
        return self._forward(tokens, positions, keep).float()

    @abstractmethod
    def _prefix(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """What the decoder has read before the first output token."""

    @abstractmethod
    def _prefill(self, contents: Sequence[SlotContent]) -> None:
        """Compute the caches of slots."""

    @abstractmethod
    def _forward(self, tokens: Tensor, positions: Tensor, keep: int) -> Tensor:
        """Logits (A, keep, V) for tokens at absolute positions, both (A, Q)."""


class LanguageModel(ABC):
    """One model on one device."""

    device: torch.device
    vocabulary: int
    """V: ids below it are shared by the pair; logits are cut to it before any softmax."""
    context: int | None = None
    """How many positions a sequence may have; None if there is no limit."""

    @abstractmethod
    def bank(self, slots: int) -> ModelBank:
        """New, empty caches for `slots` lanes."""
