"""The drafter worker: one small model, and the banks of lanes that it drives.

A round of a bank is four acts: seat lanes in free slots, draft a block, have it verified (elsewhere),
apply the verdicts. Between rounds the lanes' tokens are all there is; caches can be rebuilt from them.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.models.interface import LanguageModel, ModelBank, SlotContent
from pipeline.models.timing import seconds_per_pass
from pipeline.protocol.blocks import Pairs
from pipeline.protocol.verification import verify
from pipeline.records import Setting, Shard, Strategy
from pipeline.workers.drafting import Ending, Places, draft_block, ending, own_block
from pipeline.workers.lanes import EndsText, Finished, Lane, Rulebook, Seats, Tallies, Task
from pipeline.workers.transport import Transport, facts_read, pack
from pipeline.workers.wire import VerifyReply, VerifyRequest

PREFILL_TOKENS = 4096
"""Prompt tokens that a round computes for new examples, so that the lanes under way do not wait."""

_SPLIT_LANES = 4
"""Times the slots of a bank: when more lanes wait, any bank takes them before new examples."""


@dataclass
class Bank:
    """Slots that go through a round together; all its lanes have one setting."""

    name: str
    cache: ModelBank
    seats: Seats
    setting: int = 0
    round: int = 0
    opened: list[int] = field(default_factory=list)
    """Slots seated since the last round: both models must build their caches."""
    waiting: dict[int, deque[Lane]] = field(default_factory=dict)
    """Lanes that split off here and wait for a slot, by setting."""


class DrafterWorker:
    """Holds the drafter and its banks.

    `add` work; then, for each bank, `seat`, `draft` and `apply` in turn. `draft` alone computes.

    Args:
        ends_text: says whether output ids hold one of the settings' stop strings; None without any.
        trace: whether the run keeps traces, which tell of both models whatever a strategy needs.
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
        trace: bool = False,
    ) -> None:
        self.name = name
        self._transport = transport
        self.model = model
        self.rulebooks = [Rulebook(tuple(strategies), setting, ends_text) for setting in settings]
        self.slots = slots
        self._uses_drafter = trace or bool(self.rulebooks[0].uses_drafter.any())
        self._uses_verifier = trace or bool(self.rulebooks[0].uses_verifier.any())
        self._facts_read = facts_read(strategies)
        self.banks: list[Bank] = []
        self._num_banks = banks
        self._new: list[deque[Lane]] = []
        """Examples that nobody has begun, for each setting."""
        self.clear()

    def clear(self) -> None:
        """Forget all lanes."""
        # A verifier must not take new banks, or those of a restarted drafter, for the old ones.
        incarnation = uuid.uuid4().hex[:8]
        self.banks = [
            Bank(
                f"{self.name}/{incarnation}/{index}", self.model.bank(self.slots), Seats(self.slots)
            )
            for index in range(self._num_banks)
        ]
        self._new = [deque() for _ in self.rulebooks]

    def step_seconds(self) -> float:
        """Seconds of one drafted token at batch 1."""
        return seconds_per_pass(self.model, 1)

    def add(self, shard: Shard, ticket: int = 0) -> int:
        """Queue all examples of a shard; how many outcomes it will have comes back.

        The ends of its texts carry the ticket. Examples with an error have nothing to decode.
        """
        outcomes = 0
        for number, rulebook in enumerate(self.rulebooks):
            everyone = range(len(rulebook.strategies))
            for example in shard.examples:
                for repeat in range(rulebook.setting.repeats if example.error is None else 0):
                    task = Task(example, repeat, number, ticket)
                    self._new[number].append(Lane(task, Tallies.empty(everyone, rulebook.setting)))
                    outcomes += len(everyone)
        return outcomes

    def has_room(self) -> bool:
        """Whether fewer examples wait than there are slots."""
        return sum(map(len, self._new)) < len(self.banks) * self.slots

    def has_work(self, bank: Bank) -> bool:
        """Whether a bank has lanes to decode, or could be given some."""
        if bank.seats.held:
            return True
        return any(self._waiting(number) for number in range(len(self.rulebooks)))

    def seat(self, bank: Bank) -> bool:
        """Give the lowest free slots to lanes that wait. Whether the bank has anything to decode.

        A bank takes up another setting only when it is empty, the one that most lanes wait for. What
        is left of a bank when nothing waits moves to its lowest slots, so that no slot below the last
        one in use idles along.
        """
        seats = bank.seats
        if len(seats.free) == seats.slots:
            bank.setting = max(range(len(self.rulebooks)), key=self._waiting)
        seated = list(zip(seats.free, self._lanes_for(bank, len(seats.free)), strict=False))
        if seated:
            seats.seat(seated)
            bank.opened.extend(slot for slot, _ in seated)
        held, free = seats.held, seats.free
        while free and held and free[0] < held[-1]:
            source, target = held.pop(), free.pop(0)
            seats.move(source, target)
            bank.opened = [slot for slot in bank.opened if slot != source] + [target]
        return bool(seats.held)

    def draft(self, bank: Bank) -> VerifyRequest | VerifyReply:
        """Draft a block for all lanes of the bank.

        A run without any strategy that needs the verifier is judged here at once. In a run without
        any that needs the drafter nothing is drafted: the verifier goes on by itself.
        """
        with torch.inference_mode():
            openings, bank.opened = _openings(bank, bank.opened), []
            lanes = bank.seats.held[-1] + 1
            places = self._places(bank, lanes)
            columns = min(self._setting(bank).draft_length, int(places.budgets.max()))
            if not self._uses_drafter:
                return self._request_without_draft(bank, places, columns, openings)
            bank.cache.open(openings)
            return self._drafted(bank, places, columns, openings)

    def reopened(self, bank: Bank, request: VerifyRequest) -> VerifyRequest:
        """The same round for a verifier that lost the bank: every lane is opened from its tokens."""
        return replace(request, fresh=True, openings=_openings(bank, bank.seats.held))

    def apply(self, bank: Bank, reply: VerifyReply) -> Sequence[Finished]:
        """Advance every lane by its verdicts; lanes that split off wait for a slot."""
        step = bank.seats.advance(reply, self.rulebooks[bank.setting], bank.name)
        bank.waiting.setdefault(bank.setting, deque()).extend(step.split)
        bank.round += 1
        return step.finished

    def _setting(self, bank: Bank) -> Setting:
        return self.rulebooks[bank.setting].setting

    # --- who gets a slot ----------------------------------------------------------------------------

    def _waiting(self, setting: int) -> int:
        """How many lanes wait for a slot in a setting."""
        split = sum(len(bank.waiting.get(setting, ())) for bank in self.banks)
        return len(self._new[setting]) + split

    def _lanes_for(self, bank: Bank, slots: int) -> Iterator[Lane]:
        """Up to so many lanes for a bank.

        First those that split off here, since its caches hold most of them, then new examples. When
        many wait elsewhere those go first, so that the lanes in the making stay bounded.
        """
        own = bank.waiting.get(bank.setting) or deque()
        others = [b.waiting[bank.setting] for b in self.banks if b.waiting.get(bank.setting)]
        many = sum(map(len, others)) > _SPLIT_LANES * self.slots
        new, prefill = self._new[bank.setting], 0
        for _ in range(slots):
            longest = max(others, key=len, default=own)
            if own:
                yield own.pop()
            elif longest and (many or not new):
                yield longest.popleft()
            elif new and prefill < PREFILL_TOKENS:
                prefill += len(new[0].task.example.prompt_ids)
                yield new.popleft()

    # --- what is asked of the verifier --------------------------------------------------------------

    def _places(self, bank: Bank, lanes: int) -> Places:
        seats = bank.seats
        left = self._setting(bank).max_new_tokens - seats.lengths[:lanes]
        held = np.array([task is not None for task in seats.tasks[:lanes]])
        return Places(
            starts=seats.lengths[:lanes].copy(),
            budgets=np.where(held, left, 0),
            keys=seats.keys[:lanes].copy(),
            repeats=seats.repeats[:lanes].copy(),
        )

    def _drafted(
        self, bank: Bank, places: Places, columns: int, openings: tuple[SlotContent, ...]
    ) -> VerifyRequest | VerifyReply:
        setting, lanes = self._setting(bank), len(places.starts)
        last = bank.seats.last_tokens(lanes)
        draws = places.draws(setting.seed, columns, bank.cache.device)
        logits, tokens = draft_block(
            bank.cache, last, places.starts, draws, setting.drafting, self._transport
        )
        room = bank.cache.room(places.starts, slice(0, lanes))
        ends = ending(logits, self._ends_text(bank, tokens), places.budgets, room)
        if not self._uses_verifier:
            return self._judged_alone(bank, places, logits, tokens, ends)
        return self._request(
            bank,
            places,
            openings,
            columns=columns,
            last_tokens=last[:, 1],
            tokens=tokens.cpu().numpy(),
            draft=pack(self._transport, logits, tokens, setting, self._facts_read),
            num_drafted=ends.num_drafted.cpu().numpy(),
            ended=ends.ended.cpu().numpy(),
            exhausted=ends.exhausted.cpu().numpy(),
        )

    def _request_without_draft(
        self, bank: Bank, places: Places, columns: int, openings: tuple[SlotContent, ...]
    ) -> VerifyRequest:
        lanes = len(places.starts)
        # Who ends a text at a stop string is known here only, token by token.
        columns = 1 if self.rulebooks[bank.setting].ends_text else columns
        return self._request(
            bank,
            places,
            openings,
            columns=columns,
            last_tokens=bank.seats.last_tokens(lanes)[:, 1],
            tokens=np.zeros((lanes, 0), dtype=np.int64),
            draft=None,
            num_drafted=np.zeros(lanes, dtype=np.int64),
            ended=np.zeros(lanes, dtype=bool),
            exhausted=np.zeros(lanes, dtype=bool),
        )

    def _request(
        self, bank: Bank, places: Places, openings: tuple[SlotContent, ...], **drafted: Any
    ) -> VerifyRequest:
        assert bank.seats.tallies is not None
        return VerifyRequest(
            bank=bank.name,
            setting=bank.setting,
            slots=self.slots,
            round=bank.round,
            fresh=bank.round == 0,
            openings=openings,
            **vars(places),
            pair_rows=bank.seats.pair_slots,
            pair_strategies=bank.seats.tallies.strategies,
            **drafted,
        )

    def _judged_alone(
        self, bank: Bank, places: Places, logits: Tensor, tokens: Tensor, ends: Ending
    ) -> VerifyReply:
        """The verdicts of a drafter that works alone: every drafted token is its own."""
        assert bank.seats.tallies is not None
        device = tokens.device
        block = own_block(logits, tokens, ends, places)
        pairs = Pairs(
            torch.from_numpy(bank.seats.pair_slots).to(device),
            torch.from_numpy(bank.seats.tallies.strategies).to(device),
        )
        rulebook = self.rulebooks[bank.setting]
        verdicts = verify(block, logits, pairs, rulebook.strategies, rulebook.setting)
        return VerifyReply.of(bank.round, verdicts)

    def _ends_text(self, bank: Bank, tokens: Tensor) -> Tensor:
        """Whether each drafted token ends the text: an end-of-text id, or a stop string. (A, D)."""
        rulebook = self.rulebooks[bank.setting]
        ends = torch.isin(tokens, tokens.new_tensor(rulebook.setting.eos_token_ids))
        if rulebook.ends_text is None:
            return ends
        drafted = tokens.tolist()
        for slot in bank.seats.held:
            written = bank.seats.output_ids(slot).tolist()
            for column in range(tokens.shape[1]):
                text = (*written, *drafted[slot][: column + 1])
                ends[slot, column] |= rulebook.ends_text(text)
        return ends


def _openings(bank: Bank, slots: Sequence[int]) -> tuple[SlotContent, ...]:
    tasks = [(slot, bank.seats.tasks[slot]) for slot in slots]
    return tuple(
        SlotContent(slot, task.example.prompt_ids, tuple(bank.seats.output_ids(slot).tolist()))
        for slot, task in tasks
        if task is not None
    )
