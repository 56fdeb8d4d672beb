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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_UNLIMITED = 2**31


@dataclass(frozen=True)
class SlotContent:
    """What a slot is to hold: the truth a cache is rebuilt from."""

    slot: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int] = ()


@dataclass
class Effort:
    """What the banks of one model have computed so far, in positions of one lane each."""

    stepped: int = 0
    """Positions of steps, those of idle rows too."""
    prefilled: int = 0
    """Positions computed to open slots, encoded prompts too."""
    reused: int = 0
    """Positions that an opened slot took from a slot which held them already."""


class ModelBank(ABC):
    """The caches of one bank of one model.

    Where the lanes stand is known on the host (numpy); tokens and logits stay on the device.
    """

    def __init__(
        self,
        slots: int,
        device: torch.device,
        context: int | None = None,
        effort: Effort | None = None,
    ) -> None:
        self.slots = slots
        self.device = device
        self.effort = effort or Effort()
        self._last_position = None if context is None else context - 1
        self._prefix_lengths = np.ones(slots, dtype=np.int64)
        self._prefix_tails = torch.zeros(slots, 2, dtype=torch.long, device=device)

    def open(self, contents: Sequence[SlotContent]) -> None:
        """Fill slots from prompts and the tokens written so far, whatever they held before.

        A lane that is longer than the context is noted but not computed: it has no room.
        """
        fitting = []
        for content in contents:
            prefix = self._prefix(content.prompt_ids)
            self._prefix_lengths[content.slot] = len(prefix)
            tail = [prefix[max(0, len(prefix) - 2)], prefix[-1]]
            self._prefix_tails[content.slot] = torch.tensor(tail, device=self.device)
            if self.room(len(content.output_ids), content.slot) > 0:
                fitting.append(content)
        if fitting:
            self._fill(fitting)

    def room(self, written: Ints | int, slots: slice | int = slice(None)) -> Ints:
        """How many more tokens can be drawn for slots that have written so many, at least 0."""
        if self._last_position is None:
            return np.full_like(written, _UNLIMITED)
        last: Ints = self._last_position + 2 - (self._prefix_lengths[slots] + written)
        return np.maximum(last, 0)

    def feed(self, tokens: Tensor, starts: Ints, keep: int) -> Tensor:
        """Feed Q tokens to each of the first A slots and say what comes behind the last `keep`.

        Slots behind the first A must hold no lane: their first column may be written to.

        Args:
            tokens: int64 (A, Q); where the offset is negative the slot's own prefix is used instead.
            starts: int64 (A,), the offset of each row's first token; the others follow it.
            keep: how many of the Q columns need logits.

        Returns:
            float32 (A, keep, V); column k speaks about the token behind the k-th kept one.
        """
        lanes, width = tokens.shape
        offsets = starts[:, None] + np.arange(width)
        if (starts < 0).any():
            tail = self._prefix_tails[:lanes].gather(1, self._on_device((offsets + 2).clip(0, 1)))
            tokens = torch.where(self._on_device(offsets < 0), tail, tokens)
        # A prefix of one token has no second last: both columns are then position 0, the same token.
        # Columns of a lane that is at its end do not count, but must be somewhere.
        positions = (self._prefix_lengths[:lanes, None] + offsets).clip(0, self._last_position)
        self.effort.stepped += lanes * width
        return self._forward(tokens, positions, keep).float()

    def _on_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    @abstractmethod
    def _prefix(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """What the decoder has read before the first output token."""

    @abstractmethod
    def _fill(self, contents: Sequence[SlotContent]) -> None:
        """Have slots hold what they must."""

    @abstractmethod
    def _forward(self, tokens: Tensor, positions: Ints, keep: int) -> Tensor:
        """Logits (A, keep, V) for tokens at absolute positions, both (A, Q)."""


class LanguageModel(ABC):
    """One model on one device."""

    device: torch.device
    vocabulary: int
    """V: ids below it are shared by the pair; logits are cut to it before any softmax."""
    context: int | None = None
    """How many positions a sequence may have; None if there is no limit."""
    effort: Effort

    @abstractmethod
    def bank(self, slots: int, lone: bool = False) -> ModelBank:
        """New, empty caches for `slots` lanes.

        Args:
            lone: compute no more rows than there are lanes, for timing; last bits may then depend on
                their number.
        """
