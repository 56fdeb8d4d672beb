"""Strategies for tests: the whole table, each parameter at its ends and in between."""

from __future__ import annotations

from pipeline.protocol.strategies import KINDS, Execution, sweep
from pipeline.records import Strategy

MIXTURE = "tests.targets:mixture"

SWEEPS: dict[str, dict[str, object]] = {
    "sequence_cascade.chow": {"alpha": [0.0, 0.5, 0.9, 0.999, 1.0], "normalize": ["none", "mean"]},
    "token_cascade.chow": {"alpha": [0.0, 0.3, 0.5, 0.7, 1.0]},
    "token_cascade.entropy": {"alpha": [0.0, 0.5, 1.0, 5.0]},
    "oracle_cascade.diff": {"alpha": [-1.0, 0.0, 0.2, 1.0]},
    "oracle_cascade.diff_log": {"alpha": [-5.0, 0.0, 0.4, 5.0]},
    "lossy_spec_decode": {"alpha": [0.0, 0.2, 0.6, 0.95], "beta": [1.0, "tuned"]},
    "bild_star": {"alpha": [0.0, 0.5, 1.5, 50.0]},
    "bild": {"fallback": [0.0, 0.4, 0.7, 1.0], "rollback": [0.0, 1.0, 3.0]},
    "spec_cascade.chow": {"alpha": [0.0, 0.3, 0.5, 0.7, 1.0]},
    "spec_cascade.diff": {"alpha": [-1.0, -0.2, 0.0, 0.15, 0.4, 1.0]},
    "spec_cascade.opt": {"alpha": [-1e6, -0.4, 0.0, 0.3, 0.7, 1.5, 1e6]},
    "spec_cascade.chow_log": {"alpha": [0.0, 0.5, 1.0, 5.0]},
    "spec_cascade.diff_log": {"alpha": [-5.0, 0.0, 0.4, 5.0]},
    "spec_cascade.opt_log": {"alpha": [-1e6, -0.5, 0.0, 0.7, 1e6]},
    "spec_cascade.token_v1": {"alpha": [-1.0, 0.0, 0.3, 1.0]},
    "spec_cascade.token_v2": {"alpha": [-1.0, 0.0, 0.3, 1.0]},
    "spec_cascade.token_v3": {"alpha": [-0.5, 0.0, 0.3, 0.7, 1.0]},
    "custom": {"target": MIXTURE, "alpha": [0.0, 0.4, 1.0]},
}

EVERY = [strategy for use in KINDS for strategy in sweep(use, SWEEPS.get(use, {}))]
"""The whole table."""

AT_ANY_TEMPERATURE = [
    strategy
    for strategy in EVERY
    if not KINDS[strategy.use].dynamic and KINDS[strategy.use].execution is not Execution.SEQUENCE
]
"""Those that decode, and not only greedily."""

DECODED_GREEDILY = [
    strategy for strategy in EVERY if KINDS[strategy.use].execution is not Execution.SEQUENCE
]


def one_of_each(greedy: bool = False) -> list[Strategy]:
    """A strategy of each `use:` name that decodes, from the middle of its sweep."""
    chosen: dict[str, list[Strategy]] = {}
    for strategy in DECODED_GREEDILY if greedy else AT_ANY_TEMPERATURE:
        chosen.setdefault(strategy.use, []).append(strategy)
    return [strategies[len(strategies) // 2] for strategies in chosen.values()]


def is_speculative(strategy: Strategy) -> bool:
    return KINDS[strategy.use].execution is Execution.SPECULATIVE
