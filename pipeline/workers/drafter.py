"""The drafter worker: one small model, and the banks of lanes that it drives.

A round of a bank is four acts: seat lanes in free slots, draft a block, have it verified (elsewhere),
apply the verdicts. Between rounds the lanes' tokens are all there is; caches can be rebuilt from them.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from pipeline.models.interface import LanguageModel, ModelBank
from pipeline.models.timing import seconds_per_pass
from pipeline.records import Setting, Shard, Strategy
from pipeline.workers.drafting import Drafting
from pipeline.workers.lanes import EndsText, Finished, Lane, Rulebook, Tally
from pipeline.workers.transport import Transport, pack
from pipeline.workers.wire import LaneOpening, VerifyReply, VerifyRequest


@dataclass
class Bank:
    """Slots that go through a round together; all its lanes have one setting."""

    name: str
    cache: ModelBank
    lanes: list[Lane | None]
    setting: int = 0
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

    Args:
        ends_text: says whether output ids hold one of the settings' stop strings; None without any.
    """

    def __init__(
        self,
        name: str,
        model: LanguageModel,
        strategies: Sequence[Strategy],
        settings: Sequence[Setting],
        banks: int,
        slots: int,
        ends_text: EndsText | None = None,
        transport: Transport = "float32",
    ) -> None:
        self.name = name
        self._transport = transport
        self.model = model
        self.rulebooks = [Rulebook(tuple(strategies), setting, ends_text) for setting in settings]
        self.slots = slots
        # A verifier must not take a restarted drafter for the dead one of the same name.
        incarnation = uuid.uuid4().hex[:8]
        self.banks = [
            Bank(f"{name}/{incarnation}/{index}", model.bank(slots), [None] * slots)
            for index in range(banks)
        ]
        # Lanes that wait for a slot, for each setting: those that split off, and new examples.
        self._split: list[deque[Lane]] = [deque() for _ in settings]
        self._new: list[deque[Lane]] = [deque() for _ in settings]

    def step_seconds(self) -> float:
        """Seconds of one drafted token at batch 1."""
        return seconds_per_pass(self.model, 1)

    def add(self, shard: Shard) -> int:
        """Queue all examples of a shard; how many outcomes it will have comes back.

        Examples with an error have nothing to decode.
        """
        outcomes = 0
        for number, rulebook in enumerate(self.rulebooks):
            for example in shard.examples:
                for repeat in range(rulebook.setting.repeats if example.error is None else 0):
                    tallies = {
                        index: Tally.empty(rulebook.setting)
                        for index in range(len(rulebook.strategies))
                    }
                    lane = Lane.first(example, repeat, number, shard.index, tallies)
                    self._new[number].append(lane)
                    outcomes += len(tallies)
        return outcomes

    def seat(self, bank: Bank) -> bool:
        """Give the lowest free slots to lanes that wait. Whether the bank has anything to decode.

        Lanes that split off go before new examples, so that the lanes in the making stay bounded. A
        bank takes up another setting only when it is empty.
        """
        if not bank.held:
            queues = zip(self._split, self._new, strict=True)
            waiting = [number for number, queue in enumerate(queues) if any(queue)]
            bank.setting = waiting[0] if waiting else bank.setting
        for slot, lane in enumerate(bank.lanes):
            source = self._split[bank.setting] or self._new[bank.setting]
            if lane is None and source:
                bank.lanes[slot] = source.popleft()
                bank.opened.append(slot)
        return bool(bank.held)

    @torch.inference_mode()
    def draft(self, bank: Bank) -> VerifyRequest:
        """Draft a block for all lanes of the bank."""
        openings, bank.opened = _openings(bank, bank.opened), []
        # Free slots below the last one in use idle along; the lowest are filled first.
        lanes = bank.lanes[: bank.held[-1] + 1]
        drafting = Drafting(bank.cache, lanes, self.rulebooks[bank.setting], self._transport)
        drafting.open(openings)
        logits, tokens = drafting.run()
        ending = drafting.ending(logits, tokens)
        bank.pairs = _pair_ranges(lanes)
        return VerifyRequest(
            bank=bank.name,
            setting=bank.setting,
            slots=self.slots,
            round=bank.round,
            fresh=bank.round == 0,
            openings=openings,
            last_tokens=drafting.last_tokens[:, 1].numpy(),
            tokens=tokens.cpu().numpy(),
            draft=pack(self._transport, logits, tokens, self.rulebooks[bank.setting].setting),
            num_drafted=ending.num_drafted.cpu().numpy(),
            ended=ending.ended.cpu().numpy(),
            exhausted=ending.exhausted.cpu().numpy(),
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
            step = self.rulebooks[bank.setting].advance(lane, pairs, reply)
            finished.extend(step.finished)
            bank.lanes[slot] = step.lanes[0] if step.lanes else None
            self._split[bank.setting].extend(step.lanes[1:])
        bank.round += 1
        return finished


def _pair_ranges(lanes: Sequence[Lane | None]) -> list[range]:
    ends = np.cumsum([len(lane.tallies) if lane else 0 for lane in lanes]).tolist()
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _openings(bank: Bank, slots: Sequence[int]) -> tuple[LaneOpening, ...]:
    lanes = [(slot, bank.lanes[slot]) for slot in slots]
    return tuple(
        LaneOpening(slot, lane.example.prompt_ids, lane.output_ids) for slot, lane in lanes if lane
    )
