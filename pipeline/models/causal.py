"""Decoder-only models (Llama, Qwen, GPT-2 and their kind) on slot caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.models.caching import CachedBank, CachedModel, compiled
from pipeline.models.interface import Bools, Effort, Ints, SlotContent
from pipeline.models.slots import Feed


class CausalModel(CachedModel):
    """A decoder-only `transformers` model."""

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        self.model = model.eval()
        self.forward = self.model.forward
        self.effort = Effort()
        self.device = model.device
        self.vocabulary = vocabulary
        self.config = model.config.get_text_config()
        self.context = getattr(self.config, "max_position_embeddings", None)

    def compile(self) -> None:
        """Compile the steps."""
        self.forward, self.is_compiled = compiled(self.model.forward, self.device), True

    def bank(self, slots: int, lone: bool = False) -> CausalBank:
        """New, empty caches for `slots` lanes."""
        return CausalBank(self, slots, lone)

    def masks(self, feed: Feed) -> Tensor | dict[str, Tensor]:
        """The mask of every kind of layer; hybrids need one each, by name."""
        window = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or [])
        if not kinds:
            return feed.mask(self.model.dtype, window)
        windows = {"full_attention": None, "sliding_attention": window}
        masks = {kind: feed.mask(self.model.dtype, windows[kind]) for kind in kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))


class CausalBank(CachedBank):
    """Slots of a decoder-only model. The prefix is the prompt."""

    def __init__(self, owner: CausalModel, slots: int, lone: bool) -> None:
        super().__init__(owner, slots, owner.config.num_hidden_layers, lone)
        self._owner = owner

    def _prefix(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        return prompt_ids

    def _shareable(self, contents: Sequence[SlotContent]) -> Bools:
        return np.ones((len(contents), self._cache.slots), dtype=np.bool_)

    def _read_prompts(self, contents: Sequence[SlotContent], common: Ints, sources: Ints) -> None:
        """There is no encoder."""

    def _run(self, tokens: Tensor, feed: Feed) -> None:
        self._owner.model.base_model(**self._inputs(tokens, feed))

    def _logits(self, tokens: Tensor, feed: Feed, keep: int) -> Tensor:
        inputs = self._inputs(tokens, feed)
        logits: Tensor = self._owner.forward(**inputs, logits_to_keep=keep).logits
        return logits[..., : self._owner.vocabulary]

    def _inputs(self, tokens: Tensor, feed: Feed) -> dict[str, Any]:
        return {
            "input_ids": tokens,
            "attention_mask": self._owner.masks(feed),
            "position_ids": feed.positions,
            "cache": self._cache.cache,
            "use_cache": True,
        }
