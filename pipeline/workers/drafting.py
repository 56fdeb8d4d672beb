"""Drafting one block: token by token, for all lanes of a bank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.models.interface import ModelBank, SlotContent
from pipeline.protocol.distributions import draw, is_broken, sampling_distribution
from pipeline.randomness import Role, uniforms
from pipeline.workers.lanes import Lane, Rulebook
from pipeline.workers.transport import Transport, rounded
from pipeline.workers.wire import LaneOpening


@dataclass(frozen=True)
class Ending:
    """Where the block of each lane ends and why; see `Block`. (A,) each."""

    num_drafted: Tensor
    ended: Tensor
    exhausted: Tensor


class Drafting:
    """The block of the first A slots of a bank; free slots among them idle along.

    Args:
        cache: the drafter's slots.
        lanes: who sits in the first A slots.
    """

    def __init__(
        self,
        cache: ModelBank,
        lanes: Sequence[Lane | None],
        rulebook: Rulebook,
        transport: Transport,
    ) -> None:
        self._cache, self._lanes, self._rulebook = cache, lanes, rulebook
        self._transport = transport
        self._setting = rulebook.setting
        outputs = [lane.output_ids if lane else () for lane in lanes]
        limit = self._setting.max_new_tokens
        self.starts = torch.tensor([len(ids) for ids in outputs])
        self.budgets = torch.tensor([limit - len(lane.output_ids) if lane else 0 for lane in lanes])
        self.keys = torch.tensor([lane.key if lane else 0 for lane in lanes])
        self.repeats = torch.tensor([lane.repeat if lane else 0 for lane in lanes])
        self.last_tokens = torch.tensor([(0, 0, *ids)[-2:] for ids in outputs])
        self._columns = min(self._setting.draft_length, int(self.budgets.max()))

    def open(self, openings: Sequence[LaneOpening]) -> None:
        """Build the caches of lanes that took a slot, where the drafter's context holds them."""
        contents = [SlotContent(o.slot, o.prompt_ids, o.output_ids) for o in openings]
        self._cache.open([content for content in contents if self._cache.room(content) > 0])

    def run(self) -> tuple[Tensor, Tensor]:
        """Draft token by token. Returns logits (A, D, V) and the tokens (A, D) drawn from them.

        The first step feeds the last two tokens: after a block taken whole the cache is two behind.
        """
        device = self._cache.device
        starts, draws = self.starts.to(device), self._draws().to(device)
        fed = self.last_tokens.to(device)
        offsets = starts[:, None] + torch.tensor([-2, -1], device=device)
        logits, tokens = [], []
        for column in range(self._columns):
            raw = self._cache.feed(fed, offsets, keep=1)[:, 0]
            logits.append(rounded(self._transport, raw))
            probs = sampling_distribution(logits[-1], self._setting.drafting)
            tokens.append(draw(probs, draws[:, column]))
            fed, offsets = tokens[-1][:, None], (starts + column)[:, None]
        return torch.stack(logits, dim=1), torch.stack(tokens, dim=1)

    def ending(self, logits: Tensor, tokens: Tensor) -> Ending:
        """A block ends at the budget, the end of the text, a broken drafter, its full context."""
        ends = self._ends_text(tokens)
        behind_end = _first(ends) + 1
        room = self._room().to(tokens.device)
        limits = [behind_end, _first(is_broken(logits)), room]
        limits.append(self.budgets.to(tokens.device))
        num_drafted = torch.stack(limits).amin(dim=0).clamp_max(self._columns)
        exhausted = num_drafted == room
        return Ending(num_drafted, num_drafted == behind_end, exhausted)

    def _ends_text(self, tokens: Tensor) -> Tensor:
        """Whether each drafted token ends the text: an end-of-text id, or a stop string. (A, D)."""
        ends = torch.isin(tokens, tokens.new_tensor(self._setting.eos_token_ids))
        ends_text = self._rulebook.ends_text
        if ends_text is None:
            return ends
        for row, (lane, drafted) in enumerate(zip(self._lanes, tokens.tolist(), strict=True)):
            for column in range(self._columns if lane else 0):
                text = (*lane.output_ids, *drafted[: column + 1]) if lane else ()
                ends[row, column] |= ends_text(text)
        return ends

    def _room(self) -> Tensor:
        """How many tokens each lane's drafter can still draft, (A,)."""
        contents = [
            SlotContent(slot, lane.example.prompt_ids, lane.output_ids) if lane else None
            for slot, lane in enumerate(self._lanes)
        ]
        return torch.tensor([self._cache.room(c) if c else self._columns for c in contents])

    def _draws(self) -> Tensor:
        positions = self.starts[:, None] + torch.arange(self._columns)
        return uniforms(self._setting.seed, self.keys, self.repeats, positions, Role.DRAFT)


def _first(flags: Tensor) -> Tensor:
    """Index of the first True of each row, the row's length where there is none. (A, D) to (A,)."""
    return (~flags).long().cumprod(dim=1).sum(dim=1)
