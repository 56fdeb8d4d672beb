"""The table of strategies. A new rule is one function in `rules.py` and one line here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product

from pipeline.protocol import rules
from pipeline.protocol.targets import Kept, KeptTokens, Lossy, Target
from pipeline.records import Strategy


class Execution(Enum):
    """How a strategy uses the models, which decides what its calls are counted as."""

    DRAFTER_ONLY = "drafter only"
    VERIFIER_ONLY = "verifier only"
    SEQUENTIAL = "sequential"
    """The drafter at every token, one verifier call for each deferred token (Algorithm 2)."""
    SPECULATIVE = "speculative"
    """Blocks drafted, then judged by one verifier call (Algorithms 4 and 5)."""


@dataclass(frozen=True)
class Range:
    """The values a parameter may take, both ends included unless `below`."""

    low: float
    high: float
    below: bool = False
    """The upper end itself is excluded."""

    def __contains__(self, value: float) -> bool:
        return self.low <= value < self.high if self.below else self.low <= value <= self.high

    def __str__(self) -> str:
        return f"from {self.low:g} to {'below ' if self.below else ''}{self.high:g}"


@dataclass(frozen=True)
class Kind:
    """One line of the table: how a `use:` name executes and what it must sample from."""

    execution: Execution
    target: Target
    alpha: Range | None = None
    default_beta: float | None = None

    @property
    def uses_drafter(self) -> bool:
        """Whether its tokens depend on the drafter."""
        return self.execution is not Execution.VERIFIER_ONLY

    @property
    def uses_verifier(self) -> bool:
        """Whether its tokens depend on the verifier."""
        return self.execution is not Execution.DRAFTER_ONLY


_UNIT = Range(0, 1)
_ANY = Range(-float("inf"), float("inf"))

KINDS: dict[str, Kind] = {
    "drafter": Kind(Execution.DRAFTER_ONLY, Kept(rules.never_defer)),
    "verifier": Kind(Execution.VERIFIER_ONLY, Kept(rules.always_defer)),
    "token_cascade.chow": Kind(Execution.SEQUENTIAL, Kept(rules.chow), _UNIT),
    "spec_decode": Kind(Execution.SPECULATIVE, Kept(rules.always_defer)),
    "lossy_spec_decode": Kind(Execution.SPECULATIVE, Lossy(), Range(0, 1, below=True), 1.0),
    "spec_cascade.chow": Kind(Execution.SPECULATIVE, Kept(rules.chow), _UNIT),
    "spec_cascade.diff": Kind(Execution.SPECULATIVE, Kept(rules.diff), Range(-1, 1)),
    "spec_cascade.opt": Kind(Execution.SPECULATIVE, Kept(rules.opt), _ANY),
    "spec_cascade.token_v3": Kind(Execution.SPECULATIVE, KeptTokens(rules.token_v3), _ANY),
}


class StrategyError(ValueError):
    """A strategy that cannot be: an unknown name, or a parameter missing, unknown or out of range."""


def sweep(use: str, alpha: object = None, beta: object = None) -> list[Strategy]:
    """The strategies of one line of a job: a list for a parameter is a sweep.

    Raises:
        StrategyError: in one sentence that names the parameter and the remedy.
    """
    if use not in KINDS:
        near = difflib.get_close_matches(use, KINDS, n=1)
        remedy = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(KINDS)}"
        raise StrategyError(f"use is '{use}', which is not a strategy; {remedy}")
    pairs = product(_values("alpha", use, alpha), _values("beta", use, beta))
    return [_checked(use, a, b) for a, b in pairs]


def _values(name: str, use: str, given: object) -> Sequence[object]:
    if not isinstance(given, list):
        return [given]
    if not given:
        raise StrategyError(f"{name} is an empty list; give {use} at least one value")
    return given


def _checked(use: str, alpha: object, beta: object) -> Strategy:
    kind = KINDS[use]
    if kind.alpha is None and alpha is not None:
        raise StrategyError(f"alpha is {alpha}, but {use} takes no alpha; remove it")
    if kind.alpha is not None and alpha is None:
        raise StrategyError(
            f"alpha is missing; {use} needs a number {kind.alpha} or a list of them"
        )
    if kind.alpha is not None and not (isinstance(alpha, float | int) and alpha in kind.alpha):
        raise StrategyError(f"alpha is {alpha}, but {use} needs a number {kind.alpha}")
    if kind.default_beta is None and beta is not None:
        raise StrategyError(f"beta is {beta}, but {use} takes no beta; remove it")
    if kind.default_beta is not None and beta not in (None, kind.default_beta):
        raise StrategyError(f"beta is {beta}, but {use} supports beta = {kind.default_beta:g} only")
    number = float(alpha) if isinstance(alpha, float | int) else None
    return Strategy(use=use, alpha=number, beta=kind.default_beta)
