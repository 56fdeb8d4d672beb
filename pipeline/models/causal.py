"""Decoder-only models (Llama, Qwen, GPT-2 and their kind) on slot caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.models.interface import LanguageModel, ModelBank, SlotContent
from pipeline.models.slots import Feed, SlotCache, in_columns

_REGISTER = 16


class CausalModel(LanguageModel):
    """A decoder-only `transformers` model."""

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        self.model = model.eval()
        self.device = model.device
        self.vocabulary = vocabulary
        self.config = model.config.get_text_config()
        self.context = getattr(self.config, "max_position_embeddings", None)

    def bank(self, slots: int) -> CausalBank:
        """New, empty caches for `slots` lanes."""
        return CausalBank(self, slots)

    def masks(self, feed: Feed) -> Tensor | dict[str, Tensor]:
        """The mask of every kind of layer; hybrids need one each, by name."""
        window = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or [])
        if not kinds:
            return feed.mask(self.model.dtype, window)
        windows = {"full_attention": None, "sliding_attention": window}
        masks = {kind: feed.mask(self.model.dtype, windows[kind]) for kind in kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))


class CausalBank(ModelBank):
    """Slots of a decoder-only model. The prefix is the prompt."""

    def __init__(self, owner: CausalModel, slots: int) -> None:
        super().__init__(slots, owner.device, owner.context)
        self._owner = owner
        self._cache = SlotCache(slots, owner.config.num_hidden_layers)

    def _prefix(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        return prompt_ids

    @torch.inference_mode()
    def _prefill(self, contents: Sequence[SlotContent]) -> None:
        sequences = [[*content.prompt_ids, *content.output_ids] for content in contents]
        tokens = right_padded(sequences, self.device)
        rows = [content.slot for content in contents]
        feed = self._cache.prefill(rows, tokens.shape[1], self.device)
        # No logits are needed: the protocol feeds the last tokens again.
        self._owner.model.base_model(
            input_ids=tokens,
            attention_mask=self._owner.masks(feed),
            position_ids=feed.positions,
            cache=self._cache.cache,
            use_cache=True,
        )

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, positions: Tensor, keep: int) -> Tensor:
        feed = self._cache.step(positions)
        logits: Tensor = self._owner.model(
            input_ids=tokens,
            attention_mask=self._owner.masks(feed),
            position_ids=positions,
            cache=self._cache.cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        return logits[..., : self._owner.vocabulary]


def right_padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Sequences as int64 (R, longest, rounded up), zeros behind each: masks hide them.

    Rounded up to what a vector register holds: attention sums whole registers and a rest in another
    order, so a prompt's last bits would depend on the longest one beside it.
    """
    width = in_columns(max(len(sequence) for sequence in sequences), _REGISTER)
    rows = [[*sequence, *[0] * (width - len(sequence))] for sequence in sequences]
    return torch.tensor(rows, dtype=torch.long, device=device)
