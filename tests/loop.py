"""The shortest way to decode: one drafter, one verifier, one process, no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.models.interface import LanguageModel
from pipeline.records import Example, Outcome, Setting, Shard, Strategy
from pipeline.workers.drafter import DrafterWorker
from pipeline.workers.transport import Transport
from pipeline.workers.verifier import VerifierWorker
from pipeline.workers.wire import VerifyReply, VerifyRequest

Outcomes = dict[tuple[str, int, str], Outcome]
"""By (example id, repeat, strategy label)."""


def workers(
    drafter: LanguageModel,
    verifier: LanguageModel,
    prompts: Sequence[Sequence[int]],
    strategies: Sequence[Strategy],
    setting: Setting,
    slots: int = 4,
    banks: int = 1,
    ids: Sequence[str] | None = None,
    transport: Transport = "float32",
) -> tuple[DrafterWorker, VerifierWorker]:
    """Both workers, the drafter with all prompts as the examples "0", "1", ... or `ids`."""
    drafting = DrafterWorker(
        "drafter-0", drafter, strategies, [setting], banks, slots, transport=transport
    )
    named = zip(ids or map(str, range(len(prompts))), prompts, strict=True)
    examples = [Example(name, None, (), tuple(prompt)) for name, prompt in named]
    drafting.add(Shard(0, tuple(examples)))
    return drafting, VerifierWorker(verifier, strategies, [setting])


def drive(drafting: DrafterWorker, verify: Callable[[VerifyRequest], VerifyReply]) -> Outcomes:
    """Round by round until nothing is left; each outcome comes once."""
    outcomes: Outcomes = {}
    while seated := [bank for bank in drafting.banks if drafting.seat(bank)]:
        for bank in seated:
            drafted = drafting.draft(bank)
            reply = verify(drafted) if isinstance(drafted, VerifyRequest) else drafted
            for finished in drafting.apply(bank, reply):
                outcome = finished.outcome
                key = (outcome.example_id, outcome.repeat, outcome.strategy.label)
                assert key not in outcomes, f"{key} came twice"
                outcomes[key] = outcome
    return outcomes


def decode(
    drafter: LanguageModel,
    verifier: LanguageModel,
    prompts: Sequence[Sequence[int]],
    strategies: Sequence[Strategy],
    setting: Setting,
    slots: int = 4,
    banks: int = 1,
    transport: Transport = "float32",
) -> Outcomes:
    """All outcomes."""
    drafting, verifying = workers(
        drafter, verifier, prompts, strategies, setting, slots, banks, transport=transport
    )
    return drive(drafting, verifying.verify)
