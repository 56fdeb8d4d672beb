"""The verifier worker: one large model that judges the blocks of many banks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pipeline.models.interface import LanguageModel, ModelBank
from pipeline.models.timing import seconds_per_pass
from pipeline.protocol.blocks import Block
from pipeline.protocol.verification import verify
from pipeline.records import Setting, Strategy
from pipeline.workers.drafting import Places, draft_block, ending, own_block
from pipeline.workers.transport import as_tensor
from pipeline.workers.wire import VerifyReply, VerifyRequest


class StaleBankError(RuntimeError):
    """The verifier does not hold the bank as the drafter thinks: it was restarted, or a round is lost.

    The drafter answers by opening all lanes again from their tokens.
    """


@dataclass
class _Bank:
    cache: ModelBank
    next_round: int
    last_reply: VerifyReply | None = field(default=None, repr=False)


class VerifierWorker:
    """Holds the verifier and a cache for every bank that sends it blocks."""

    def __init__(
        self,
        model: LanguageModel,
        strategies: Sequence[Strategy],
        settings: Sequence[Setting],
        trace: bool = False,
    ) -> None:
        self.model = model
        self.strategies = tuple(strategies)
        self.settings = tuple(settings)
        self.trace = trace
        self._banks: dict[str, _Bank] = {}

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """Judge a block. A repeated request gets the stored reply and changes nothing.

        Raises:
            StaleBankError: the bank is unknown here, or another round was expected.
        """
        bank = self._banks.get(request.bank)
        if bank is not None and bank.last_reply and bank.last_reply.round == request.round:
            return bank.last_reply
        if request.fresh:
            self._forget_former(request.bank)
            bank = _Bank(self.model.bank(request.slots), next_round=request.round)
            self._banks[request.bank] = bank
        if bank is None or bank.next_round != request.round:
            raise StaleBankError(f"{request.bank} is not at round {request.round}")
        reply = self._judge(bank.cache, request)
        bank.next_round, bank.last_reply = request.round + 1, reply
        return reply

    def _forget_former(self, name: str) -> None:
        """Drop the caches of banks whose drafter began afresh. Names are drafter/incarnation/number."""
        drafter, incarnation, _ = name.split("/")
        former = [
            bank
            for bank in self._banks
            if bank.split("/")[0] == drafter and bank.split("/")[1] != incarnation
        ]
        for bank in former:
            del self._banks[bank]

    def step_seconds(self) -> float:
        """Seconds of the verification of one block at batch 1."""
        return seconds_per_pass(self.model, self.settings[0].block_size + 1)

    @torch.inference_mode()
    def _judge(self, cache: ModelBank, request: VerifyRequest) -> VerifyReply:
        cache.open(request.openings)
        setting = self.settings[request.setting]
        if request.draft is None:
            block = self._own_block(cache, request, setting)
            logits = block.drafter_logits
            assert logits is not None
        else:
            block = request.block(self.model.device, self.model.vocabulary)
            # Scored are the drafted positions, and one more for the bonus of Algorithm 4.
            columns = request.columns + (setting.bonus == "verifier")
            last = as_tensor(request.last_tokens, self.model.device)
            fed = torch.cat([last[:, None], block.tokens], dim=1)[:, :columns]
            logits = cache.feed(fed, request.starts - 1, keep=columns)
        pairs = request.pairs(self.model.device)
        verdicts = verify(block, logits, pairs, self.strategies, setting, self.trace)
        return VerifyReply.of(request.round, verdicts)

    def _own_block(self, cache: ModelBank, request: VerifyRequest, setting: Setting) -> Block:
        """What the verifier writes when no drafter works for it; it will keep every token."""
        places = Places(request.starts, request.budgets, request.keys, request.repeats)
        draws = places.draws(setting.seed, request.columns, cache.device)
        logits, tokens = draft_block(
            cache, request.last_tokens[:, None], request.starts, draws, setting.sampling
        )
        ends_text = torch.isin(tokens, tokens.new_tensor(setting.eos_token_ids))
        unlimited = np.full_like(request.starts, request.columns + 1)
        ends = ending(logits, ends_text, request.budgets, unlimited)
        return own_block(logits, tokens, ends, places)
