"""The ragged slot cache: static key/value slots that plug into `transformers` attention layers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import mark_static_address
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "speccascade_slots"
"""The name of `slot_attention` in the registry of `transformers`."""

MIN_ROWS = 4
"""Matrix products of fewer rows take another kernel, with other last bits."""

MASKING = "slot_masking"
"""The attribute of a T5 attention module that says what hides its columns, a `Masking`."""

COLUMNS = 32
"""Cache columns are read and grown in multiples of this, so that shapes repeat."""

COMPILED_COLUMNS = 128
"""The same for compiled passes: each shape is compiled for itself."""


def in_columns(length: int, multiple: int = COLUMNS) -> int:
    """A length rounded up to whole blocks of columns."""
    return -(-length // multiple) * multiple


class Masking(Enum):
    """Where an attention with a relative bias finds its mask."""

    BOTH = auto()
    """In the mask, to which the bias is added."""
    BIAS = auto()
    """In the bias: the mask was added once for all layers."""
    MASK = auto()
    """In the mask; the bias is all zeros."""


@dataclass(frozen=True)
class Feed:
    """What one forward pass feeds: absolute positions (A, Q) and how many columns it reads.

    `rows` is None for a step over the first A slots, else it names the slots of the A rows. A `fresh`
    pass fills its slots from column 0 and attends to nothing but itself.
    """

    positions: Tensor
    columns: int
    rows: Tensor | None = None
    fresh: bool = False

    def distances(self) -> Tensor:
        """Query position minus cache column, (A, Q, columns); negative is the future."""
        column = torch.arange(self.columns, device=self.positions.device)
        return self.positions[:, :, None] - column

    def mask(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The additive causal mask (A, 1, Q, columns), with a sliding window where a layer has one."""
        distances = self.distances()
        visible = distances >= 0
        if window is not None:
            visible &= distances < window
        return additive(visible, dtype)[:, None]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, the lowest finite number elsewhere: an all-hidden row must not become NaN."""
    ends = torch.tensor([torch.finfo(dtype).min, 0.0], dtype=dtype, device=visible.device)
    return ends[visible.long()]


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, (slots, heads, columns, head size) each, zero at first."""

    def __init__(self, store: SlotCache) -> None:
        super().__init__()
        self._store = store

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate on the first pass, when heads, head size and dtype are known."""
        heads, shape = key_states.shape[1], (self._store.slots, key_states.shape[1])
        self.keys = key_states.new_zeros(*shape, self._store.columns, key_states.shape[3])
        self.values = value_states.new_zeros(*shape, self._store.columns, value_states.shape[3])
        self._heads = torch.arange(heads, device=key_states.device)[None, :, None]
        self.is_initialized = True

    def grow(self) -> None:
        """Add columns until there are as many as the store wants."""
        if self.is_initialized:
            missing = self._store.columns - self.keys.shape[2]
            self.keys = pad(self.keys, (0, 0, 0, missing))
            self.values = pad(self.values, (0, 0, 0, missing))

    def keep_address(self) -> None:
        """Let CUDA graphs write to the cache where it lies."""
        if self.is_initialized:
            for tensor in (self.keys, self.values):
                mark_static_address(tensor)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the fed columns; return what the queries may look at."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # A model over several GPUs has layers elsewhere than where it is fed.
        feed, device = self._store.feed, key_states.device
        rows = None if feed.rows is None else feed.rows.to(device)
        if feed.fresh:
            width = key_states.shape[2]
            self.keys[rows, :, :width] = key_states
            self.values[rows, :, :width] = value_states
            return key_states, value_states
        written, positions = self._store.written_rows.to(device), feed.positions.to(device)
        where = (written, self._heads, positions[:, None, :])
        self.keys.index_put_(where, key_states)
        self.values.index_put_(where, value_states)
        read = slice(0, len(key_states)) if rows is None else rows
        return self.keys[read, :, : feed.columns], self.values[read, :, : feed.columns]

    def copy(self, rows: Tensor, sources: Tensor, columns: int) -> None:
        """Have slots `rows` hold the first columns of slots `sources`, as they are now."""
        if self.is_initialized:
            rows, sources = rows.to(self.keys.device), sources.to(self.keys.device)
            self.keys[rows, :, :columns] = self.keys[sources, :, :columns]
            self.values[rows, :, :columns] = self.values[sources, :, :columns]

    def get_seq_length(self) -> int:
        """0: models must not derive positions from the cache, each lane has its own."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Never asked for, since masks are passed in."""
        return self._store.columns, 0

    def get_max_length(self) -> int:
        """No maximum: the cache grows."""
        return -1


class SlotCache:
    """The self-attention cache of a bank: one `SlotLayer` a layer, and the feed in progress."""

    def __init__(self, slots: int, layers: int, is_compiled: bool = False) -> None:
        self.slots = slots
        self._is_compiled = is_compiled
        self.columns = 0
        self.layers = [SlotLayer(self) for _ in range(layers)]
        self.cache = Cache(layers=self.layers)
        self.feed: Feed
        self.written_rows: Tensor
        """The slots that the feed writes to, (A, 1, 1)."""

    def begin(self, feed: Feed) -> Feed:
        """Make room for a pass."""
        self.feed = feed
        rows = feed.rows
        if rows is None:
            rows = torch.arange(len(feed.positions), device=feed.positions.device)
        self.written_rows = rows[:, None, None]
        if feed.columns > self.columns:
            self.columns = in_columns(feed.columns)
            for layer in self.layers:
                layer.grow()
        if self._is_compiled:
            for layer in self.layers:
                layer.keep_address()
        return feed


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention with additive masks; grouped heads are packed into the query axis.

    Packing leaves the keys as they lie in the cache, where repeating them for each group would copy
    them. Query is (A, heads, Q, D), key and value (A, groups, K, D); returns (A, Q, heads, D).
    """
    lanes, heads, length, size = query.shape
    per_group = heads // key.shape[1]
    masking = getattr(module, MASKING, Masking.BOTH)
    if position_bias is None or masking is Masking.MASK:
        mask = attention_mask
    elif attention_mask is None or masking is Masking.BIAS:
        mask = position_bias
    else:
        mask = position_bias + attention_mask
    if per_group > 1:
        query = query.reshape(lanes, key.shape[1], per_group * length, size)
        mask = None if mask is None else mask.repeat(1, 1, per_group, 1)
    few = MIN_ROWS - query.shape[2]
    if few > 0:
        query = pad(query, (0, 0, 0, few))
        if mask is not None and mask.shape[2] > 1:
            mask = pad(mask, (0, 0, 0, few))
    attended = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    attended = attended[:, :, : per_group * length]
    return attended.reshape(lanes, heads, length, -1).transpose(1, 2), None


AttentionInterface.register(ATTENTION, slot_attention)
# Without a mask function of the same name `transformers` drops two-dimensional masks silently.
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
