"""The drafter worker: one small model, and the banks of lanes that it drives.

A round of a bank is four acts: fill free slots, draft a block, have it verified (elsewhere), apply
the verdicts. Between rounds the lanes' tokens are all there is; caches can be rebuilt from them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pipeline.models.interface import LanguageModel, ModelBank, SlotContent
from pipeline.protocol.distributions import confidence, draw, is_broken, sampling_distribution
from pipeline.randomness import Role, uniforms
from pipeline.records import Setting, Shard, Strategy
from pipeline.workers.lanes import Finished, Lane, advance
from pipeline.workers.wire import LaneOpening, VerifyReply, VerifyRequest


@dataclass
class Bank:
    """Slots that go through a round together, and the lanes that wait for one of them."""

    name: str
    cache: ModelBank
    lanes: list[Lane | None]
    round: int = 0
    fresh: bool = True
    """Whether the verifier must open every lane: at the start, and after it lost them."""
    waiting: deque[Lane] = field(default_factory=deque)
    pairs: list[range] = field(default_factory=list)
    """Rows of the reply that belong to each slot."""

    @property
    def is_idle(self) -> bool:
        """Nothing to decode here."""
        return not self.waiting and all(lane is None for lane in self.lanes)


class DrafterWorker:
    """Holds the drafter and its banks. `add` work, then alternate `draft` and `apply` for each bank."""

    def __init__(
        self,
        name: str,
        model: LanguageModel,
        strategies: Sequence[Strategy],
        setting: Setting,
        banks: int,
        slots: int,
    ) -> None:
        self.model = model
        self.strategies = tuple(strategies)
        self.setting = setting
        self.slots = slots
        self.banks = [
            Bank(f"{name}/bank-{index}", model.bank(slots), [None] * slots)
            for index in range(banks)
        ]
        self._queue: deque[Lane] = deque()

    def add(self, shard: Shard) -> None:
        """Queue all examples of a shard. Examples with an error have nothing to decode."""
        for example in shard.examples:
            for repeat in range(self.setting.repeats if example.error is None else 0):
                lane = Lane.first(example, repeat, shard.index, len(self.strategies), self.setting)
                self._queue.append(lane)

    def has_work(self, bank: Bank) -> bool:
        """Whether a round of this bank would decode anything."""
        return bool(self._queue) or not bank.is_idle

    def reopen(self, bank: Bank) -> None:
        """The verifier lost the bank: its next round opens every lane again from its tokens."""
        bank.fresh = True

    @torch.inference_mode()
    def draft(self, bank: Bank) -> VerifyRequest:
        """Fill free slots and draft a block for all lanes of the bank."""
        opened = self._fill(bank)
        lanes = _active(bank.lanes)
        block = _Drafting(self.model.device, lanes, self.setting)
        logits, tokens = block.run(bank.cache)
        bank.pairs = _pair_ranges(lanes)
        fresh, bank.fresh = bank.fresh, False
        held = [slot for slot, lane in enumerate(lanes) if lane is not None]
        return VerifyRequest(
            bank=bank.name,
            slots=self.slots,
            round=bank.round,
            fresh=fresh,
            openings=tuple(_opening(slot, lanes[slot]) for slot in (held if fresh else opened)),
            last_tokens=block.last_tokens[:, 1].numpy(),
            tokens=tokens.cpu().numpy(),
            drafter_logits=logits.cpu().numpy(),
            num_drafted=block.num_drafted(logits, tokens).cpu().numpy(),
            budgets=block.budgets.numpy(),
            starts=block.starts.numpy(),
            keys=block.keys.numpy(),
            repeats=block.repeats.numpy(),
            pair_rows=np.repeat(np.arange(len(lanes)), [len(pairs) for pairs in bank.pairs]),
            pair_strategies=np.array([i for lane in lanes if lane for i in lane.tallies]),
        )

    def apply(self, bank: Bank, reply: VerifyReply) -> list[Finished]:
        """Advance every lane by its verdicts; lanes that split off wait for a slot in this bank."""
        finished: list[Finished] = []
        for slot, pairs in enumerate(bank.pairs):
            lane = bank.lanes[slot]
            if lane is None:
                continue
            step = advance(lane, pairs, reply, self.strategies, self.setting)
            finished.extend(step.finished)
            bank.lanes[slot] = step.lanes[0] if step.lanes else None
            bank.waiting.extend(step.lanes[1:])
        bank.round += 1
        return finished

    def _fill(self, bank: Bank) -> list[int]:
        """Seat waiting lanes, then new examples, in the lowest free slots. Returns those slots.

        Waiting lanes go first, so that the number of lanes in the making stays bounded.
        """
        opened = []
        for slot, lane in enumerate(bank.lanes):
            if lane is None and (source := bank.waiting or self._queue):
                bank.lanes[slot] = source.popleft()
                opened.append(slot)
        bank.cache.open([_content(slot, bank.lanes[slot]) for slot in opened])
        return opened


class _Drafting:
    """The drafting of one block for the first A slots of a bank. Free slots among them idle along."""

    def __init__(
        self, device: torch.device, lanes: Sequence[Lane | None], setting: Setting
    ) -> None:
        self.setting = setting
        self.device = device
        outputs = [lane.output_ids if lane else () for lane in lanes]
        limit = setting.max_new_tokens
        self.starts = torch.tensor([len(ids) for ids in outputs])
        self.budgets = torch.tensor([limit - len(lane.output_ids) if lane else 0 for lane in lanes])
        self.keys = torch.tensor([lane.key if lane else 0 for lane in lanes])
        self.repeats = torch.tensor([lane.repeat if lane else 0 for lane in lanes])
        self.last_tokens = torch.tensor([(0, 0, *ids)[-2:] for ids in outputs])
        self.columns = min(setting.draft_length, int(self.budgets.max()))

    def run(self, cache: ModelBank) -> tuple[Tensor, Tensor]:
        """Draft token by token. Returns logits (A, D, V) and the tokens (A, D) drawn from them.

        The first step feeds the last two tokens: after a block taken whole the cache is two behind.
        """
        starts = self.starts.to(self.device)
        draws = self._draws().to(self.device)
        fed = self.last_tokens.to(self.device)
        offsets = starts[:, None] + torch.tensor([-2, -1], device=self.device)
        logits, tokens = [], []
        for column in range(self.columns):
            logits.append(cache.feed(fed, offsets, keep=1)[:, 0])
            probs = sampling_distribution(logits[-1], self.setting.sampling)
            tokens.append(draw(probs, draws[:, column]))
            fed, offsets = tokens[-1][:, None], (starts + column)[:, None]
        return torch.stack(logits, dim=1), torch.stack(tokens, dim=1)

    def num_drafted(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """How many columns count, int64 (A,): up to the budget, the end of the text, a broken drafter."""
        column = torch.arange(self.columns, device=tokens.device)
        eos = tokens.new_tensor(self.setting.eos_token_ids)
        ended = _first(torch.isin(tokens, eos)) + 1
        broken = _first(is_broken(confidence(logits)))
        limit = self.budgets.to(tokens.device)
        return torch.minimum(torch.minimum(ended, broken), limit).clamp_max(len(column))

    def _draws(self) -> Tensor:
        positions = self.starts[:, None] + torch.arange(self.columns)
        return uniforms(self.setting.seed, self.keys, self.repeats, positions, Role.DRAFT)


def _first(flags: Tensor) -> Tensor:
    """Index of the first True of each row, the row's length where there is none. (A, D) to (A,)."""
    return (~flags).long().cumprod(dim=1).sum(dim=1)


def _active(lanes: Sequence[Lane | None]) -> Sequence[Lane | None]:
    """The slots up to the last one in use. The lowest free slots are filled first, so holes are rare."""
    used = [slot for slot, lane in enumerate(lanes) if lane is not None]
    return lanes[: used[-1] + 1]


def _pair_ranges(lanes: Sequence[Lane | None]) -> list[range]:
    ends = np.cumsum([len(lane.tallies) if lane else 0 for lane in lanes]).tolist()
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _opening(slot: int, lane: Lane | None) -> LaneOpening:
    assert lane is not None, f"slot {slot} is free"
    return LaneOpening(slot, lane.example.prompt_ids, lane.output_ids)


def _content(slot: int, lane: Lane | None) -> SlotContent:
    opening = _opening(slot, lane)
    return SlotContent(slot, opening.prompt_ids, opening.output_ids)
