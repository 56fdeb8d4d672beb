"""The drafter worker: one small model, and the banks of lanes that it drives.

A round of a bank is four acts: seat lanes in free slots, draft a block, have it verified (elsewhere),
apply the verdicts. Between rounds the lanes' tokens are all there is; caches can be rebuilt from them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from pipeline.models.interface import LanguageModel, ModelBank, SlotContent
from pipeline.models.timing import seconds_per_pass
from pipeline.protocol.distributions import confidence, draw, is_broken, sampling_distribution
from pipeline.randomness import Role, uniforms
from pipeline.records import Setting, Shard, Strategy
from pipeline.workers.lanes import Finished, Lane, advance
from pipeline.workers.wire import LaneOpening, VerifyReply, VerifyRequest


@dataclass
class Bank:
    """Slots that go through a round together."""

    name: str
    cache: ModelBank
    lanes: list[Lane | None]
    round: int = 0
    opened: list[int] = field(default_factory=list)
    """Slots seated since the last round: both models must build their caches."""
    pairs: list[range] = field(default_factory=list)
    """Rows of the reply that belong to each slot."""

    @property
    def held(self) -> list[int]:
        """The slots in use."""
        return [slot for slot, lane in enumerate(self.lanes) if lane is not None]


class DrafterWorker:
    """Holds the drafter and its banks.

    `add` work; then, for each bank, `seat`, `draft` and `apply` in turn. `draft` alone computes.
    """

    def __init__(
        self,
        name: str,
        model: LanguageModel,
        strategies: Sequence[Strategy],
        setting: Setting,
        banks: int,
        slots: int,
    ) -> None:
        self.name = name
        self.model = model
        self.strategies = tuple(strategies)
        self.setting = setting
        self.slots = slots
        self.banks = [
            Bank(f"{name}/bank-{index}", model.bank(slots), [None] * slots)
            for index in range(banks)
        ]
        self._new: deque[Lane] = deque()
        self._split: deque[Lane] = deque()

    def step_seconds(self) -> float:
        """Seconds of one drafted token at batch 1."""
        return seconds_per_pass(self.model, 1)

    def add(self, shard: Shard) -> int:
        """Queue all examples of a shard; how many outcomes it will have comes back.

        Examples with an error have nothing to decode.
        """
        lanes = [
            Lane.first(example, repeat, shard.index, len(self.strategies), self.setting)
            for example in shard.examples
            if example.error is None
            for repeat in range(self.setting.repeats)
        ]
        self._new.extend(lanes)
        return len(lanes) * len(self.strategies)

    def seat(self, bank: Bank) -> bool:
        """Give the lowest free slots to lanes that wait. Whether the bank has anything to decode.

        Lanes that split off go before new examples, so that the lanes in the making stay bounded.
        """
        for slot, lane in enumerate(bank.lanes):
            if lane is None and (source := self._split or self._new):
                bank.lanes[slot] = source.popleft()
                bank.opened.append(slot)
        return bool(bank.held)

    @torch.inference_mode()
    def draft(self, bank: Bank) -> VerifyRequest:
        """Draft a block for all lanes of the bank."""
        openings, bank.opened = _openings(bank, bank.opened), []
        bank.cache.open([SlotContent(o.slot, o.prompt_ids, o.output_ids) for o in openings])
        # Free slots below the last one in use idle along; the lowest are filled first.
        lanes = bank.lanes[: bank.held[-1] + 1]
        drafting = _Drafting(self.model.device, lanes, self.setting)
        logits, tokens = drafting.run(bank.cache)
        bank.pairs = _pair_ranges(lanes)
        return VerifyRequest(
            bank=bank.name,
            slots=self.slots,
            round=bank.round,
            fresh=bank.round == 0,
            openings=openings,
            last_tokens=drafting.last_tokens[:, 1].numpy(),
            tokens=tokens.cpu().numpy(),
            drafter_logits=logits.cpu().numpy(),
            num_drafted=drafting.num_drafted(logits, tokens).cpu().numpy(),
            budgets=drafting.budgets.numpy(),
            starts=drafting.starts.numpy(),
            keys=drafting.keys.numpy(),
            repeats=drafting.repeats.numpy(),
            pair_rows=np.repeat(np.arange(len(lanes)), [len(pairs) for pairs in bank.pairs]),
            pair_strategies=np.array([i for lane in lanes if lane for i in lane.tallies]),
        )

    def reopened(self, bank: Bank, request: VerifyRequest) -> VerifyRequest:
        """The same round for a verifier that lost the bank: every lane is opened from its tokens."""
        return replace(request, fresh=True, openings=_openings(bank, bank.held))

    def apply(self, bank: Bank, reply: VerifyReply) -> list[Finished]:
        """Advance every lane by its verdicts; lanes that split off wait for a slot of any bank."""
        finished: list[Finished] = []
        for slot, pairs in enumerate(bank.pairs):
            if (lane := bank.lanes[slot]) is None:
                continue
            step = advance(lane, pairs, reply, self.strategies, self.setting)
            finished.extend(step.finished)
            bank.lanes[slot] = step.lanes[0] if step.lanes else None
            self._split.extend(step.lanes[1:])
        bank.round += 1
        return finished


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


def _pair_ranges(lanes: Sequence[Lane | None]) -> list[range]:
    ends = np.cumsum([len(lane.tallies) if lane else 0 for lane in lanes]).tolist()
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _openings(bank: Bank, slots: Sequence[int]) -> tuple[LaneOpening, ...]:
    lanes = [(slot, bank.lanes[slot]) for slot in slots]
    return tuple(
        LaneOpening(slot, lane.example.prompt_ids, lane.output_ids) for slot, lane in lanes if lane
    )
