"""A table instead of a network: exact, tiny, and free of `transformers`. For tests and simulations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.models.interface import Effort, Ints, LanguageModel, ModelBank, SlotContent


class TableModel(LanguageModel):
    """A Markov chain: the next token's logits are a row of a table, chosen by the last token.

    Args:
        logits: float (V, V), row t holds the logits behind token t.
    """

    def __init__(self, logits: Tensor, context: int | None = None) -> None:
        self.logits = logits
        self.context = context
        self.device = logits.device
        self.vocabulary = logits.shape[1]
        self.effort = Effort()

    def bank(self, slots: int, lone: bool = False) -> TableBank:
        """New, empty slots. There is nothing to cache."""
        return TableBank(self, slots)


class TableBank(ModelBank):
    """Slots of a table model; the prefix is the prompt."""

    def __init__(self, owner: TableModel, slots: int) -> None:
        super().__init__(slots, owner.device, owner.context, owner.effort)
        self._owner = owner

    def _prefix(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        return prompt_ids

    def _fill(self, contents: Sequence[SlotContent]) -> None:
        pass

    def _forward(self, tokens: Tensor, positions: Ints, keep: int) -> Tensor:
        return self._owner.logits[tokens[:, -keep:].to(torch.long)]
