"""Sequence cascades: the whole answer of the drafter, or of the verifier.

They need no model work of their own: a row follows from the rows of the two models alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pipeline.protocol.strategies import KINDS, Execution
from pipeline.records import Outcome, Strategy

_MODELS = (Strategy("drafter"), Strategy("verifier"))


def decoded(strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """The strategies that must be decoded so that all of `strategies` have a row."""
    own = [s for s in strategies if KINDS[s.use].execution is not Execution.SEQUENCE]
    missing = [model for model in _MODELS if model not in own]
    return (*own, *(missing if len(own) < len(strategies) else ()))


def cascade(strategy: Strategy, drafter: Outcome, verifier: Outcome) -> Outcome:
    """The outcome of a sequence cascade (section 2; Chow's rule on the sequence probability).

    It defers iff the drafter's untempered probability of its own answer is below 1 - alpha; with
    `normalize: mean` the geometric mean over its tokens. alpha = 0 gives the verifier, 1 the
    drafter. A deferred answer costs the drafter's calls and one verifier call for each of its tokens,
    all of them deferred.
    """
    if drafter.error is not None:
        return replace(drafter, strategy=strategy)
    log_probability = drafter.log_confidence
    if strategy.normalize == "mean":
        log_probability /= max(1, len(drafter.output_ids))
    # Compared as probabilities, so that alpha = 1 keeps even an answer whose probability underflows.
    if math.exp(log_probability) >= 1 - (strategy.alpha or 0.0):
        return replace(drafter, strategy=strategy)
    calls = drafter.counts.drafter_calls
    counts = replace(verifier.counts, drafter_calls=calls)
    seconds = drafter.wall_seconds + verifier.wall_seconds
    return replace(verifier, strategy=strategy, counts=counts, wall_seconds=seconds)


def with_cascades(
    strategies: Sequence[Strategy], outcomes: Sequence[Outcome]
) -> tuple[Outcome, ...]:
    """The outcomes of all strategies asked for: those decoded, and those that follow from them."""
    by_key = {(o.example_id, o.setting, o.repeat, o.strategy.use): o for o in outcomes}
    kept = [outcome for outcome in outcomes if outcome.strategy in strategies]
    for strategy in strategies:
        if KINDS[strategy.use].execution is Execution.SEQUENCE:
            for (example, setting, repeat, use), drafter in by_key.items():
                if use == "drafter":
                    verifier = by_key[example, setting, repeat, "verifier"]
                    kept.append(cascade(strategy, drafter, verifier))
    return tuple(kept)
