"""A request may come twice, and a verifier may be lost: the texts are the same.

Planted faults these tests catch: a repeated request that feeds the cache again; a stored reply that
is given for another round; a new verifier that answers as if it held the lanes; lanes reopened
without the tokens written so far.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from torch import Tensor

from pipeline.models.interface import Ints, LanguageModel, ModelBank
from pipeline.protocol.strategies import KINDS
from pipeline.records import Sampling, Setting, Strategy
from pipeline.workers.verifier import StaleBankError, VerifierWorker
from pipeline.workers.wire import VerifyReply, VerifyRequest
from tests.loop import Outcomes, decode, drive, workers
from tests.tiny import CAUSAL, EOS, SEQ2SEQ, slot_model

every_model = pytest.mark.parametrize("name", [CAUSAL[0], CAUSAL[1], SEQ2SEQ[0]])

PROMPTS = [[7, 8, 9], [20], [33, 5, 12, 40, 41, 6], [2, 50]]
SETTING = Setting(3, 11, Sampling(0.7), seed=4, eos_token_ids=(EOS,))
STRATEGIES = [
    Strategy("spec_decode"),
    Strategy("verifier"),
    Strategy("spec_cascade.chow", 0.6),
    Strategy("spec_cascade.token_v3", 0.5),
]
assert all(strategy.use in KINDS for strategy in STRATEGIES)


class Counting(LanguageModel):
    """Counts the forward passes of its banks."""

    def __init__(self, inner: LanguageModel) -> None:
        self.inner, self.feeds = inner, 0
        self.device, self.vocabulary = inner.device, inner.vocabulary
        self.effort = inner.effort

    def bank(self, slots: int) -> ModelBank:
        bank = self.inner.bank(slots)
        feed = bank.feed

        def counted(tokens: Tensor, starts: Ints, keep: int) -> Tensor:
            self.feeds += 1
            return feed(tokens, starts, keep)

        bank.feed = counted
        return bank


def rows(outcomes: Outcomes) -> dict:
    return {
        key: (outcome.output_ids, outcome.finish_reason, outcome.counts, outcome.error)
        for key, outcome in outcomes.items()
    }


def undisturbed(name: str) -> dict:
    return rows(
        decode(slot_model(name, 2), slot_model(name, 1), PROMPTS, STRATEGIES, SETTING, 3, 2)
    )


def pair(name: str) -> tuple:
    return workers(slot_model(name, 2), slot_model(name, 1), PROMPTS, STRATEGIES, SETTING, 3, 2)


def assert_equal_replies(first: VerifyReply, second: VerifyReply) -> None:
    for part in fields(VerifyReply):
        assert np.array_equal(getattr(first, part.name), getattr(second, part.name)), part.name


@every_model
def test_a_repeated_request_gets_the_same_reply_and_advances_nothing(name: str) -> None:
    drafting, verifying = pair(name)
    verifying.model = counting = Counting(verifying.model)
    rounds = 0

    def verify(request: VerifyRequest) -> VerifyReply:
        nonlocal rounds
        rounds += 1
        reply = verifying.verify(request)
        assert_equal_replies(verifying.verify(request), reply)
        return reply

    assert rows(drive(drafting, verify)) == undisturbed(name)
    assert counting.feeds == rounds


@every_model
def test_a_verifier_that_was_lost_between_any_rounds_is_replaced_without_a_trace(name: str) -> None:
    drafting, verifying = pair(name)
    banks = {bank.name: bank for bank in drafting.banks}
    lost = 0

    def verify(request: VerifyRequest) -> VerifyReply:
        nonlocal verifying, lost
        if request.round % 2 == 1 and not request.fresh:
            verifying = VerifierWorker(slot_model(name, 1), *_given(verifying))
            lost += 1
        try:
            return verifying.verify(request)
        except StaleBankError:
            return verifying.verify(drafting.reopened(banks[request.bank], request))

    assert rows(drive(drafting, verify)) == undisturbed(name)
    assert lost > 2


def _given(worker: VerifierWorker) -> tuple:
    return worker.strategies, worker.settings


def test_a_bank_that_the_verifier_does_not_hold_is_stale() -> None:
    drafting, verifying = pair("llama")
    bank = drafting.banks[0]
    assert drafting.seat(bank)
    drafting.apply(bank, verifying.verify(drafting.draft(bank)))
    assert drafting.seat(bank)
    second = drafting.draft(bank)
    with pytest.raises(StaleBankError):
        VerifierWorker(slot_model("llama", 1), *_given(verifying)).verify(second)
    verifying.verify(second)


def test_a_round_that_never_arrived_makes_the_next_one_stale() -> None:
    drafting, verifying = pair("llama")
    _, twin = pair("llama")
    bank = drafting.banks[0]
    requests = []
    for _ in range(3):
        assert drafting.seat(bank)
        requests.append(drafting.draft(bank))
        drafting.apply(bank, twin.verify(requests[-1]))
    verifying.verify(requests[0])
    with pytest.raises(StaleBankError):
        verifying.verify(requests[2])


def test_banks_of_one_verifier_do_not_mix() -> None:
    drafting, verifying = pair("llama")
    requests = []
    for bank in drafting.banks:
        assert drafting.seat(bank)
        requests.append(drafting.draft(bank))
    first, second = (verifying.verify(request) for request in requests)
    assert first.num_tokens.shape != second.num_tokens.shape or not np.array_equal(
        first.tokens, second.tokens
    )
    assert_equal_replies(verifying.verify(requests[0]), first)
    assert_equal_replies(verifying.verify(requests[1]), second)
