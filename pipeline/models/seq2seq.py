"""Encoder-decoder models of the T5 family on slot caches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache

from pipeline.models.caching import (
    REGISTER,
    CachedBank,
    CachedModel,
    compiled,
    of_similar_length,
    right_padded,
)
from pipeline.models.interface import Bools, Effort, Ints, SlotContent
from pipeline.models.slots import MASKING, Feed, Masking, SlotCache, SlotLayer, additive, in_columns


class Seq2SeqModel(CachedModel):
    """A T5 model (also v1.1 and mT5). The decoder's prefix is its start token, position 0."""

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        self.model = model.eval()
        self.device = model.device
        self.vocabulary = vocabulary
        self.config = model.config
        self.start_token = int(self.config.decoder_start_token_id)
        self.decoder = model.decoder
        self.effort = Effort()
        self.cross_attentions = [block.layer[1].EncDecAttention for block in model.decoder.block]
        for block in model.decoder.block:
            setattr(block.layer[0].SelfAttention, MASKING, Masking.BIAS)
            setattr(block.layer[1].EncDecAttention, MASKING, Masking.MASK)
        self.no_mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=self.device)
        self.no_states = torch.zeros(1, 1, 1, dtype=model.dtype, device=self.device)
        self.feed: Feed
        self._bias_by_distance = torch.empty(0)
        self._self_attention = model.decoder.block[0].layer[0].SelfAttention
        # T5 takes all lanes to be equally long; ours are ragged, so each query brings its position.
        self._self_attention.compute_bias = self._compute_bias

    def compile(self) -> None:
        """Compile the decoder."""
        self.decoder, self.is_compiled = compiled(self.model.decoder, self.device), True

    def bank(self, slots: int, lone: bool = False) -> Seq2SeqBank:
        """New, empty caches for `slots` lanes."""
        return Seq2SeqBank(self, slots, lone)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits from the decoder's last hidden states, as the model's own forward makes them."""
        if self.config.scale_decoder_outputs:
            hidden = hidden * self.config.d_model**-0.5
        # Over several GPUs the head may be elsewhere than the last layer, and both than the tokens.
        logits: Tensor = self.model.lm_head(hidden.to(self.model.lm_head.weight.device))
        return logits[..., : self.vocabulary].to(self.device)

    def _compute_bias(self, *_: object, **__: object) -> Tensor:
        """The relative bias of the feed in progress with its causal mask, (A, heads, Q, columns)."""
        biases = self._biases(self.feed.columns)
        future = biases.shape[1] // 2
        distances = self.feed.distances().to(biases.device)
        return biases[:, distances + future].transpose(0, 1)

    def _biases(self, length: int) -> Tensor:
        """The bias of each head at distances -L, ..., L - 1, L at least `length`: (heads, 2 L).

        What lies in the future has the lowest finite number.
        """
        if self._bias_by_distance.shape[-1] < 2 * length:
            attention = self._self_attention
            device = attention.relative_attention_bias.weight.device
            buckets = attention._relative_position_bucket(
                -torch.arange(2 * length, device=device),
                bidirectional=False,
                num_buckets=attention.relative_attention_num_buckets,
                max_distance=attention.relative_attention_max_distance,
            )
            past = attention.relative_attention_bias(buckets).T
            future = torch.full_like(past, torch.finfo(past.dtype).min)
            self._bias_by_distance = torch.cat([future, past], dim=1)
        return self._bias_by_distance


class CrossLayer(SlotLayer):
    """Keys and values of an encoded prompt: written once a lane, never cropped, never rolled back."""

    def __init__(self, store: SlotCache) -> None:
        super().__init__(store)
        self._all_keys = self._all_values = torch.empty(0)

    def write(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store (R, heads, source, D) into slots `rows`; shorter sources leave stale columns, masked."""
        if self._all_keys.numel() == 0:
            self._all_keys = keys.new_zeros(self._store.slots, *keys.shape[1:])
            self._all_values = torch.zeros_like(self._all_keys)
        missing = max(0, keys.shape[2] - self._all_keys.shape[2])
        self._all_keys = pad(self._all_keys, (0, 0, 0, missing))
        self._all_values = pad(self._all_values, (0, 0, 0, missing))
        rows = rows.to(keys.device)
        self._all_keys[rows, :, : keys.shape[2]] = keys
        self._all_values[rows, :, : keys.shape[2]] = values

    def share(self, rows: Tensor, sources: Tensor) -> None:
        """Let slots `rows` hold what slots `sources` hold."""
        rows, sources = rows.to(self._all_keys.device), sources.to(self._all_keys.device)
        self._all_keys[rows] = self._all_keys[sources]
        self._all_values[rows] = self._all_values[sources]

    def look(self, rows: Tensor | slice, width: int) -> None:
        """Show the cross-attention the slots of the coming pass, as far as prompts reach."""
        rows = rows if isinstance(rows, slice) else rows.to(self._all_keys.device)
        self.keys = self._all_keys[rows, :, :width]
        self.values = self._all_values[rows, :, :width]


class Seq2SeqBank(CachedBank):
    """Slots of a T5 model: a self-attention cache, and the encoded prompt of each slot."""

    def __init__(self, owner: Seq2SeqModel, slots: int, lone: bool) -> None:
        layers = len(owner.cross_attentions)
        super().__init__(owner, slots, layers, lone)
        self._owner = owner
        self._cross = [CrossLayer(self._cache) for _ in range(layers)]
        self._cross_mask = torch.zeros(
            self._cache.slots, 1, 1, 0, dtype=owner.model.dtype, device=owner.device
        )
        self._both = EncoderDecoderCache(self._cache.cache, Cache(layers=list(self._cross)))
        self._prompts: list[tuple[int, ...]] = [()] * self._cache.slots
        self._both.is_updated = dict.fromkeys(range(layers), True)

    def _prefix(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        return [self._owner.start_token]

    def _shareable(self, contents: Sequence[SlotContent]) -> Bools:
        same = [[tuple(c.prompt_ids) == prompt for prompt in self._prompts] for c in contents]
        return np.array(same, dtype=np.bool_)

    def _read_prompts(self, contents: Sequence[SlotContent], common: Ints, sources: Ints) -> None:
        """Take encoded prompts over with the columns; encode those that no slot has."""
        known, unknown = (common > 0).nonzero()[0], (common == 0).nonzero()[0]
        slots = np.array([content.slot for content in contents])
        if len(known):
            rows, origin = (self._on_device(a[known]) for a in (slots, sources))
            for layer in self._cross:
                layer.share(rows, origin)
            self._cross_mask[rows] = self._cross_mask[origin]
        if len(unknown):
            self._encode([contents[index] for index in unknown])
        for content in contents:
            self._prompts[content.slot] = tuple(content.prompt_ids)

    def _encode(self, contents: Sequence[SlotContent]) -> None:
        """Run the encoder, once a prompt, and keep what the decoder's cross-attention reads."""
        slots: dict[tuple[int, ...], list[int]] = {}
        for content in contents:
            slots.setdefault(tuple(content.prompt_ids), []).append(content.slot)
        prompts = list(slots)
        for members in of_similar_length([len(p) for p in prompts], self._pass_tokens):
            together = [prompts[index] for index in members]
            self._encode_together(together, [slots[prompt] for prompt in together])

    def _encode_together(
        self, prompts: Sequence[tuple[int, ...]], slots: Sequence[Sequence[int]]
    ) -> None:
        """Encode prompts in one pass; `slots` are those that each is for."""
        tokens = right_padded(prompts, self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        column = torch.arange(tokens.shape[1], device=self.device)
        mask = additive(column < lengths[:, None], self._owner.model.dtype)[:, None, None]
        encoded = self._owner.model.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        self.effort.prefilled += tokens.numel()
        rows = torch.tensor([slot for of_prompt in slots for slot in of_prompt], device=self.device)
        repeats = torch.tensor([len(of_prompt) for of_prompt in slots], device=self.device)
        for layer, attention in zip(self._cross, self._owner.cross_attentions, strict=True):
            shape = (*encoded.shape[:2], attention.n_heads, attention.key_value_proj_dim)
            device = attention.k.weight.device
            there, times = encoded.to(device), repeats.to(device)
            keys = attention.k(there).view(shape).transpose(1, 2)
            values = attention.v(there).view(shape).transpose(1, 2)
            layer.write(rows, *(kv.repeat_interleave(times, dim=0) for kv in (keys, values)))
        self._write_mask(rows, mask.repeat_interleave(repeats, dim=0))

    def _write_mask(self, rows: Tensor, mask: Tensor) -> None:
        lowest = torch.finfo(mask.dtype).min
        missing = max(0, mask.shape[-1] - self._cross_mask.shape[-1])
        self._cross_mask = pad(self._cross_mask, (0, missing), value=lowest)
        self._cross_mask[rows] = lowest
        self._cross_mask[rows, ..., : mask.shape[-1]] = mask

    def _run(self, tokens: Tensor, feed: Feed) -> None:
        self._decode(tokens, feed)

    def _logits(self, tokens: Tensor, feed: Feed, keep: int) -> Tensor:
        return self._owner.head(self._decode(tokens, feed)[:, -keep:])

    def _decode(self, tokens: Tensor, feed: Feed) -> Tensor:
        rows = slice(0, len(tokens)) if feed.rows is None else feed.rows
        self._owner.feed = feed
        width = in_columns(max(map(len, self._prompts)), REGISTER)
        for layer in self._cross:
            layer.look(rows, width)
        cross_mask = self._cross_mask[rows, ..., :width]
        hidden: Tensor = self._owner.decoder(
            input_ids=tokens,
            # The relative bias carries the mask; without any, `transformers` would make one.
            attention_mask=self._owner.no_mask,
            # The cross-attention reads its cache; the states themselves are not kept.
            encoder_hidden_states=self._owner.no_states.expand(len(tokens), 1, 1),
            encoder_attention_mask=cross_mask,
            cache=self._both,
            use_cache=True,
        ).last_hidden_state
        return hidden
