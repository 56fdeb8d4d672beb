"""Slots filled from each other: what one slot holds of a lane need not be computed for another.

When a lane splits, the part that goes on in another slot shares its prompt and all but the last
tokens with the slot it came from; so does a new lane of an example that is under way. Column c of a
slot speaks of position c alone, so the shared columns are copied and only what is missing is
computed. A bank remembers which tokens its columns hold; nobody else has to.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from pipeline.models.interface import Bools, Ints, LanguageModel, ModelBank, SlotContent
from pipeline.models.slots import COLUMNS, COMPILED_COLUMNS, MIN_ROWS, Feed, SlotCache, in_columns

REGISTER = 16
"""Columns that attention sums at once."""

_NOTHING = -1
_SHAPES = 64
"""Of compiled passes: widths of blocks times sizes of caches."""

_PASS_WEIGHTS = {"cpu": 1.5e8, "cuda": 1e11}
"""Weights that a device multiplies with one token in the time that it takes to set a pass going.

Rough: it decides no result, only how much padding is worth a pass."""


class CachedModel(LanguageModel):
    """A `transformers` model whose steps can be compiled."""

    model: PreTrainedModel
    is_compiled = False

    @abstractmethod
    def compile(self) -> None:
        """Compile the steps: quicker for small models, a minute at the start, other last bits.

        On a GPU they become CUDA graphs. Opening slots is not compiled: each prompt has its length.
        """


class CachedBank(ModelBank):
    """Slots of a model with attention caches."""

    def __init__(self, owner: CachedModel, slots: int, layers: int, lone: bool) -> None:
        super().__init__(slots, owner.device, owner.context, owner.effort)
        device = owner.device
        # Rows behind the slots stand in for lanes where there are too few.
        self._cache = SlotCache(max(slots, MIN_ROWS), layers, owner.is_compiled)
        self._is_compiled = owner.is_compiled
        self._pass_tokens = _PASS_WEIGHTS.get(device.type, 0.0) / owner.model.num_parameters()
        self._min_rows = 1 if lone else MIN_ROWS
        self._held = torch.full((self._cache.slots, 0), _NOTHING, device=device)
        """The token that each column of each slot holds."""

    @abstractmethod
    def _shareable(self, contents: Sequence[SlotContent]) -> Bools:
        """Whether each content may take columns over from each slot, (R, slots)."""

    @abstractmethod
    def _read_prompts(self, contents: Sequence[SlotContent], common: Ints, sources: Ints) -> None:
        """Prepare what stands beside the columns, before any is copied."""

    @abstractmethod
    def _run(self, tokens: Tensor, feed: Feed) -> None:
        """A pass that fills the cache; no logits are needed."""

    @abstractmethod
    def _logits(self, tokens: Tensor, feed: Feed, keep: int) -> Tensor:
        """A pass that fills the cache, and its last logits (A, keep, V)."""

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, positions: Ints, keep: int) -> Tensor:
        lanes = len(tokens)
        # A compiled pass has one shape, that of a full bank. The slots behind hold no lanes.
        idle = (self._cache.slots if self._is_compiled else self._min_rows) - lanes
        if idle > 0:
            tokens, positions = pad(tokens, (0, 0, 0, idle)), np.pad(positions, ((0, idle), (0, 0)))
        return self._logits(tokens, self._step(tokens, positions), keep)[:lanes]

    @torch.inference_mode()
    def _fill(self, contents: Sequence[SlotContent]) -> None:
        sequences = [[*self._prefix(c.prompt_ids), *c.output_ids] for c in contents]
        rows = torch.tensor([content.slot for content in contents], device=self.device)
        tokens = right_padded(sequences, self.device)
        lengths = np.array([len(sequence) for sequence in sequences])
        common, sources = self._longest_match(contents, tokens)
        self._read_prompts(contents, common, sources)
        self._take_over(rows, common, sources)
        # The token that a lane ends with is fed again by whoever goes on with it.
        missing = lengths - 1 - common
        fresh = ((common == 0) & (missing > 0)).nonzero()[0]
        behind = ((common > 0) & (missing > 0)).nonzero()[0]
        for members in of_similar_length(lengths[fresh], self._pass_tokens):
            self._prefill(rows[fresh[members]], [sequences[index] for index in fresh[members]])
        if len(behind):
            tails = [sequences[index][common[index] : -1] for index in behind]
            self._catch_up(rows[behind], tails, common[behind])

    def _longest_match(self, contents: Sequence[SlotContent], tokens: Tensor) -> tuple[Ints, Ints]:
        """How much of each content a slot holds already, and which slot holds most; both (R,)."""
        width = min(tokens.shape[1], self._held.shape[1])
        same = self._held[None, :, :width] == tokens[:, None, :width]
        matches: Ints = same.long().cumprod(dim=2).sum(dim=2).cpu().numpy()
        matches = matches * self._shareable(contents)
        return matches.max(axis=1), matches.argmax(axis=1)

    def _take_over(self, rows: Tensor, common: Ints, sources: Ints) -> None:
        """Copy the columns that other slots hold, and forget all others."""
        known, width = common.nonzero()[0], int(common.max())
        targets, origin = rows[known], self._on_device(sources[known])
        held = self._held[origin, :width]
        if width:
            for layer in self._cache.layers:
                layer.copy(targets, origin, width)
        self._held[rows] = _NOTHING
        self._held[targets, :width] = held
        self.effort.reused += int(common.sum())

    def _prefill(self, rows: Tensor, sequences: Sequence[Sequence[int]]) -> None:
        """Compute whole sequences in slots. No logits are needed: the last token is fed again."""
        tokens = right_padded(sequences, self.device)
        width = tokens.shape[1]
        positions = torch.arange(width, device=self.device).expand(len(rows), width)
        self.effort.prefilled += tokens.numel()
        self._run(tokens, self._cache.begin(Feed(positions, width, rows, fresh=True)))
        self._note(rows, positions, tokens)

    def _catch_up(self, rows: Tensor, tails: Sequence[Sequence[int]], starts: Ints) -> None:
        """Compute what is missing behind the columns that were copied."""
        width = max(MIN_ROWS, *map(len, tails))
        # Padding repeats the last token where it stands, which changes nothing.
        steps = np.minimum(np.arange(width), np.array([[len(tail) - 1] for tail in tails]))
        tokens = np.array(
            [[tail[step] for step in row] for tail, row in zip(tails, steps, strict=True)]
        )
        self.effort.prefilled += tokens.size
        fed = self._on_device(tokens)
        self._run(fed, self._step(fed, starts[:, None] + steps, rows))

    def _step(self, tokens: Tensor, positions: Ints, rows: Tensor | None = None) -> Feed:
        """Begin a pass over the first A slots, or over slots `rows`, behind what they hold."""
        multiple = COMPILED_COLUMNS if self._is_compiled else COLUMNS
        columns = in_columns(int(positions.max()) + 1, multiple)
        where = self._on_device(positions)
        feed = self._cache.begin(Feed(where, columns, rows))
        self._note(self._cache.written_rows[:, 0, 0], where, tokens)
        return feed

    def _note(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Remember what slots hold now. Columns behind were computed for another text."""
        missing = self._cache.columns - self._held.shape[1]
        if missing > 0:
            self._held = pad(self._held, (0, missing), value=_NOTHING)
        column = torch.arange(self._held.shape[1], device=self.device)
        held = torch.where(column < positions[:, :1], self._held[rows], _NOTHING)
        self._held[rows] = held.scatter(1, positions, tokens)


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function with torch.compile; on a GPU as CUDA graphs."""
    # Blocks get shorter at the end of budgets; both models of a pair share the code that is counted.
    torch._dynamo.config.recompile_limit = _SHAPES
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    return torch.compile(function, dynamic=False, mode=mode)


def of_similar_length(lengths: Sequence[int], pass_tokens: float) -> Iterator[list[int]]:
    """Indexes of sequences that go through a pass together, the longest first.

    Args:
        pass_tokens: a pass costs about as much as so many tokens beside its own; where padding the
            shorter sequences would cost more, they get a pass of their own.
    """
    together: list[int] = []
    padding = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        width = in_columns(lengths[index], REGISTER)
        padding += in_columns(lengths[together[0]], REGISTER) - width if together else 0
        if padding > pass_tokens:
            yield together
            together, padding = [], 0
        together.append(index)
    if together:
        yield together


def right_padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Sequences as int64 (R, longest, rounded up), zeros behind each: masks hide them.

    Rounded up to what a vector register holds: attention sums whole registers and a rest in another
    order, so a prompt's last bits would depend on the longest one beside it.
    """
    width = in_columns(max(len(sequence) for sequence in sequences), REGISTER)
    rows = [[*sequence, *[0] * (width - len(sequence))] for sequence in sequences]
    return torch.tensor(rows, dtype=torch.long, device=device)
