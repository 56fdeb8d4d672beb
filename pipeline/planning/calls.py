"""How many calls of the models to expect, each strategy counted as if it ran alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.planning.balance import tokens_per_round
from pipeline.protocol.strategies import KINDS, Execution
from pipeline.records import Setting, Strategy


@dataclass(frozen=True)
class Assumed:
    """What is taken for granted of texts: that every drafted token is accepted alike, and their length."""

    acceptance: float
    tokens: float
    """Of a text."""


@dataclass(frozen=True)
class Calls:
    """Calls of the models for one text of one strategy, in the mean, and how many strategies have them."""

    execution: Execution
    strategies: int
    drafter: float
    verifier: float


def expected_calls(
    strategies: Sequence[Strategy], settings: Sequence[Setting], assumed: Assumed
) -> tuple[Calls, ...]:
    """One line for each way to use the models that the job has, in the order of its strategies."""
    counted = Counter(KINDS[strategy.use].execution for strategy in strategies)
    return tuple(
        Calls(execution, number, *_calls(execution, settings, assumed))
        for execution, number in counted.items()
    )


def rounds_per_text(settings: Sequence[Setting], assumed: Assumed) -> float:
    """Rounds of a text, in the mean over settings: its length over the tokens of a round."""
    return sum(_rounds(setting, assumed) for setting in settings) / len(settings)


def _rounds(setting: Setting, assumed: Assumed) -> float:
    return assumed.tokens / tokens_per_round(assumed.acceptance, setting.block_size)


def _calls(
    execution: Execution, settings: Sequence[Setting], assumed: Assumed
) -> tuple[float, float]:
    """Of the drafter and of the verifier.

    A cascade that is deferred defers each token with probability 1 - acceptance, which is a guess: rules
    differ. A sequence cascade is counted at its worst: the whole answer of both.
    """
    tokens = assumed.tokens
    rounds = rounds_per_text(settings, assumed)
    drafted = sum(_rounds(s, assumed) * s.draft_length for s in settings) / len(settings)
    return {
        Execution.DRAFTER_ONLY: (tokens, 0.0),
        Execution.VERIFIER_ONLY: (0.0, tokens),
        Execution.SEQUENTIAL: (tokens, (1 - assumed.acceptance) * tokens),
        Execution.ORACLE: (tokens, tokens),
        Execution.SPECULATIVE: (drafted, rounds),
        Execution.SEQUENCE: (tokens, tokens),
    }[execution]
