"""Encoder-decoder models of the T5 family on slot caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache

from pipeline.models.causal import right_padded
from pipeline.models.interface import LanguageModel, ModelBank, SlotContent
from pipeline.models.slots import Feed, SlotCache, SlotLayer, additive


class Seq2SeqModel(LanguageModel):
    """A T5 model (also v1.1 and mT5). The decoder's prefix is its start token, position 0."""

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        self.model = model.eval()
        self.device = model.device
        self.vocabulary = vocabulary
        self.config = model.config
        self.start_token = int(self.config.decoder_start_token_id)
        self.cross_attentions = [block.layer[1].EncDecAttention for block in model.decoder.block]
        self.feed: Feed
        self._bias_by_distance = torch.empty(0)
        self._self_attention = model.decoder.block[0].layer[0].SelfAttention
        # T5 takes all lanes to be equally long; ours are ragged, so each query brings its position.
        self._self_attention.compute_bias = self._compute_bias

    def bank(self, slots: int) -> Seq2SeqBank:
        """New, empty caches for `slots` lanes."""
        return Seq2SeqBank(self, slots)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits from the decoder's last hidden states, as the model's own forward makes them."""
        if self.config.scale_decoder_outputs:
            hidden = hidden * self.config.d_model**-0.5
        logits: Tensor = self.model.lm_head(hidden)
        return logits[..., : self.vocabulary]

    def _compute_bias(self, *_: object, **__: object) -> Tensor:
        """The relative bias of the feed in progress, (A, heads, Q, columns)."""
        distances = self.feed.distances().clamp_min(0)
        by_distance = self._biases(int(distances.max()) + 1)
        return by_distance[:, distances].transpose(0, 1)

    def _biases(self, length: int) -> Tensor:
        """The bias of each head at distances 0, 1, ..., (heads, at least `length`)."""
        if self._bias_by_distance.shape[-1] < length:
            attention = self._self_attention
            buckets = attention._relative_position_bucket(
                -torch.arange(2 * length, device=self.device),
                bidirectional=False,
                num_buckets=attention.relative_attention_num_buckets,
                max_distance=attention.relative_attention_max_distance,
            )
            self._bias_by_distance = attention.relative_attention_bias(buckets).T
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
        self._all_keys[rows, :, : keys.shape[2]] = keys
        self._all_values[rows, :, : keys.shape[2]] = values

    def look(self, rows: Tensor | slice) -> None:
        """Show the cross-attention the slots of the coming pass."""
        self.keys, self.values = self._all_keys[rows], self._all_values[rows]


class Seq2SeqBank(ModelBank):
    """Slots of a T5 model: a self-attention cache, and the encoded prompt of each slot."""

    def __init__(self, owner: Seq2SeqModel, slots: int) -> None:
        super().__init__(slots, owner.device)
        self._owner = owner
        layers = len(owner.cross_attentions)
        self._cache = SlotCache(slots, layers)
        self._cross = [CrossLayer(self._cache) for _ in range(layers)]
        self._cross_mask = torch.zeros(slots, 1, 1, 0, dtype=owner.model.dtype, device=owner.device)
        self._both = EncoderDecoderCache(self._cache.cache, Cache(layers=list(self._cross)))
        self._both.is_updated = dict.fromkeys(range(layers), True)

    def _prefix(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        return [self._owner.start_token]

    @torch.inference_mode()
    def _prefill(self, contents: Sequence[SlotContent]) -> None:
        self._encode(contents)
        written = [content for content in contents if len(content.output_ids)]
        if written:
            start = self._owner.start_token
            sequences = [[start, *content.output_ids] for content in written]
            tokens = right_padded(sequences, self.device)
            rows = [content.slot for content in written]
            feed = self._cache.prefill(rows, tokens.shape[1], self.device)
            self._decode(tokens, feed, torch.tensor(rows, device=self.device))

    def _encode(self, contents: Sequence[SlotContent]) -> None:
        """Run the encoder and keep what the decoder's cross-attention reads."""
        tokens = right_padded([content.prompt_ids for content in contents], self.device)
        lengths = torch.tensor([len(c.prompt_ids) for c in contents], device=self.device)
        column = torch.arange(tokens.shape[1], device=self.device)
        mask = additive(column < lengths[:, None], self._owner.model.dtype)[:, None, None]
        encoded = self._owner.model.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        rows = torch.tensor([content.slot for content in contents], device=self.device)
        for layer, attention in zip(self._cross, self._owner.cross_attentions, strict=True):
            shape = (*encoded.shape[:2], attention.n_heads, attention.key_value_proj_dim)
            keys = attention.k(encoded).view(shape).transpose(1, 2)
            values = attention.v(encoded).view(shape).transpose(1, 2)
            layer.write(rows, keys, values)
        self._write_mask(rows, mask)

    def _write_mask(self, rows: Tensor, mask: Tensor) -> None:
        lowest = torch.finfo(mask.dtype).min
        missing = max(0, mask.shape[-1] - self._cross_mask.shape[-1])
        self._cross_mask = pad(self._cross_mask, (0, missing), value=lowest)
        self._cross_mask[rows] = lowest
        self._cross_mask[rows, ..., : mask.shape[-1]] = mask

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, positions: Tensor, keep: int) -> Tensor:
        feed = self._cache.step(positions)
        hidden = self._decode(tokens, feed, slice(0, len(tokens)))
        return self._owner.head(hidden[:, -keep:])

    def _decode(self, tokens: Tensor, feed: Feed, rows: Tensor | slice) -> Tensor:
        self._owner.feed = feed
        for layer in self._cross:
            layer.look(rows)
        cross_mask = self._cross_mask[rows]
        hidden: Tensor = self._owner.model.decoder(
            input_ids=tokens,
            attention_mask=feed.mask(self._owner.model.dtype),
            # The cross-attention reads its cache; the states themselves are not kept.
            encoder_hidden_states=cross_mask.new_zeros(len(tokens), 1, 1),
            encoder_attention_mask=cross_mask,
            cache=self._both,
            use_cache=True,
        ).last_hidden_state
        return hidden
