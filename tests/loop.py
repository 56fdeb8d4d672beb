"""The shortest way to decode: one drafter, one verifier, one process, no scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.models.interface import LanguageModel
from pipeline.records import Example, Outcome, Setting, Shard, Strategy
from pipeline.workers.drafter import DrafterWorker
from pipeline.workers.verifier import VerifierWorker


def decode(
    drafter: LanguageModel,
    verifier: LanguageModel,
    prompts: Sequence[Sequence[int]],
    strategies: Sequence[Strategy],
    setting: Setting,
    slots: int = 4,
    banks: int = 1,
) -> dict[tuple[str, int, str], Outcome]:
    """All outcomes by (example id, repeat, strategy label)."""
    examples = tuple(
        Example(str(index), None, (), tuple(prompt)) for index, prompt in enumerate(prompts)
    )
    drafting = DrafterWorker("drafter-0", drafter, strategies, setting, banks, slots)
    verifying = VerifierWorker(verifier, strategies, setting)
    drafting.add(Shard(0, examples))
    outcomes: dict[tuple[str, int, str], Outcome] = {}
    while seated := [bank for bank in drafting.banks if drafting.seat(bank)]:
        for bank in seated:
            reply = verifying.verify(drafting.draft(bank))
            for finished in drafting.apply(bank, reply):
                outcome = finished.outcome
                key = (outcome.example_id, outcome.repeat, outcome.strategy.label)
                assert key not in outcomes, f"{key} came twice"
                outcomes[key] = outcome
    return outcomes
