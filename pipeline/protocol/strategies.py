"""The table of strategies. A new rule is one function in `rules.py` and one line here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from itertools import product
from math import inf
from typing import Any

from pipeline.protocol import rules
from pipeline.protocol.custom_code import CustomCodeError, imported
from pipeline.protocol.targets import Custom, Kept, KeptTokens, Lossy, Target
from pipeline.records import Strategy


class StrategyError(ValueError):
    """A strategy that cannot be: an unknown name, or a parameter missing, unknown or out of range."""


class Execution(Enum):
    """How a strategy uses the models, which decides what its calls are counted as."""

    DRAFTER_ONLY = "drafter only"
    VERIFIER_ONLY = "verifier only"
    SEQUENTIAL = "sequential"
    """The drafter at every token, one verifier call for each deferred token (Algorithm 2)."""
    ORACLE = "oracle"
    """Both models at every token (Algorithm 3)."""
    SPECULATIVE = "speculative"
    """Blocks drafted, then judged by one verifier call (Algorithms 4 and 5)."""
    SEQUENCE = "sequence"
    """The whole answer of one model; its row follows from those of the two models alone."""


@dataclass(frozen=True)
class Range:
    """The numbers a parameter may be, both ends included unless `below`."""

    low: float
    high: float
    below: bool = False
    """The upper end itself is excluded."""

    def __contains__(self, value: object) -> bool:
        """Whether a value is a number in the range."""
        if not isinstance(value, float | int) or isinstance(value, bool):
            return False
        return self.low <= value < self.high if self.below else self.low <= value <= self.high

    def __str__(self) -> str:
        """As a sentence needs it."""
        if (self.low, self.high) == (-inf, inf):
            return "any number"
        if self.high == inf:
            return f"a number from {self.low:g} up"
        return f"a number from {self.low:g} to {'below ' if self.below else ''}{self.high:g}"


@dataclass(frozen=True)
class OneOf:
    """The values a parameter may be; the first is what it is when the job does not say."""

    options: tuple[float | str, ...]

    def __contains__(self, value: object) -> bool:
        """Whether it is one of them."""
        return value in self.options

    def __str__(self) -> str:
        """As a sentence needs it."""
        return " or ".join(str(option) for option in self.options)


class Function:
    """A parameter that names a function as `module:function`."""

    def __contains__(self, value: object) -> bool:
        """Whether it has that form."""
        return isinstance(value, str) and len(value.split(":")) == 2 and all(value.split(":"))

    def __str__(self) -> str:
        """As a sentence needs it."""
        return "a function as module:function"


Allowed = Range | OneOf | Function


@dataclass(frozen=True)
class Kind:
    """One line of the table: how a `use:` name executes and what it samples from.

    `threshold` names the parameter that the rule gets as its alpha. A `dynamic` block ends before
    the first token that the drafter is less sure of than `fallback`, and needs temperature 0.
    """

    execution: Execution
    target: Target | None
    takes: Mapping[str, Allowed]
    about: str
    """Formula, source, and what the two ends of the range give."""
    optional: tuple[str, ...] = ()
    threshold: str = "alpha"
    dynamic: bool = False
    reads_drafter_confidence: bool = False
    """Whether the rule reads the drafter's confidence in every token, not its maximum or entropy."""

    @property
    def facts_read(self) -> frozenset[str]:
        """Which of the `DrafterFacts` it needs; for the risk, too, where there is a choice."""
        keep = self.target.keep if isinstance(self.target, Kept) else None
        reads = {"entropies"} if keep in _ENTROPY_RULES else set()
        if self.execution is Execution.DRAFTER_ONLY:
            reads.add("of_draft")
        elif self.target is not None and self.target.defers and keep is not rules.always_defer:
            reads.add("peaks")
        return frozenset(reads)

    @property
    def uses_drafter(self) -> bool:
        """Whether its tokens depend on the drafter."""
        return self.execution is not Execution.VERIFIER_ONLY

    @property
    def uses_verifier(self) -> bool:
        """Whether its tokens depend on the verifier."""
        return self.execution is not Execution.DRAFTER_ONLY


_ENTROPY_RULES = (rules.entropy, rules.diff_log, rules.opt_log)
_UNIT, _SIGNED_UNIT = Range(0, 1), Range(-1, 1)
_ANY, _POSITIVE = Range(-inf, inf), Range(0, inf)


def _cascade(execution: Execution, rule: rules.KeepRule, alpha: Range) -> Kind:
    return Kind(execution, Kept(rule), {"alpha": alpha}, _about(rule))


def _token_cascade(rule: rules.KeepRule, alpha: Range, reads_drafter: bool = False) -> Kind:
    return Kind(
        Execution.SPECULATIVE,
        KeptTokens(rule),
        {"alpha": alpha},
        _about(rule),
        reads_drafter_confidence=reads_drafter,
    )


def _about(documented: object) -> str:
    return inspect.getdoc(documented) or ""


KINDS: dict[str, Kind] = {
    "drafter": Kind(Execution.DRAFTER_ONLY, Kept(rules.never_defer), {}, "q, the drafter alone."),
    "verifier": Kind(
        Execution.VERIFIER_ONLY, Kept(rules.always_defer), {}, "p, the verifier alone."
    ),
    "sequence_cascade.chow": Kind(
        Execution.SEQUENCE,
        None,
        {"alpha": _UNIT, "normalize": OneOf(("none", "mean"))},
        """The drafter's whole answer, or the verifier's where the drafter's untempered probability
of its own answer is below 1 - alpha (section 2); with `normalize: mean` the geometric mean over its
tokens. alpha = 0 gives the verifier, 1 the drafter.""",
    ),
    "token_cascade.chow": _cascade(Execution.SEQUENTIAL, rules.chow, _UNIT),
    "token_cascade.entropy": _cascade(Execution.SEQUENTIAL, rules.entropy, _POSITIVE),
    "oracle_cascade.diff": _cascade(Execution.ORACLE, rules.diff, _SIGNED_UNIT),
    "oracle_cascade.diff_log": _cascade(Execution.ORACLE, rules.diff_log, _ANY),
    "spec_decode": Kind(
        Execution.SPECULATIVE, Kept(rules.always_defer), {}, _about(rules.always_defer)
    ),
    "lossy_spec_decode": Kind(
        Execution.SPECULATIVE,
        Lossy(),
        {"alpha": Range(0, 1, below=True), "beta": OneOf((1.0, "tuned"))},
        _about(Lossy),
    ),
    "bild_star": _cascade(Execution.SPECULATIVE, rules.bild_star, _POSITIVE),
    "bild": Kind(
        Execution.SPECULATIVE,
        Kept(rules.bild_star),
        {"fallback": _UNIT, "rollback": _POSITIVE},
        """The original BiLD (Kim et al., 2023): greedy, with a dynamic block. It drafts until max q
< fallback, where the verifier writes the token; drafted tokens are kept up to the first with -log
p(x) > rollback, which is replaced by argmax p. fallback = 1 and rollback = 0 give the verifier;
fallback = 0 and a large rollback the drafter, but for one token behind each block.""",
        threshold="rollback",
        dynamic=True,
    ),
    "spec_cascade.chow": _cascade(Execution.SPECULATIVE, rules.chow, _UNIT),
    "spec_cascade.diff": _cascade(Execution.SPECULATIVE, rules.diff, _SIGNED_UNIT),
    "spec_cascade.opt": _cascade(Execution.SPECULATIVE, rules.opt, _ANY),
    "spec_cascade.chow_log": _cascade(Execution.SPECULATIVE, rules.entropy, _POSITIVE),
    "spec_cascade.diff_log": _cascade(Execution.SPECULATIVE, rules.diff_log, _ANY),
    "spec_cascade.opt_log": _cascade(Execution.SPECULATIVE, rules.opt_log, _ANY),
    "spec_cascade.token_v1": _token_cascade(rules.token_v1, _SIGNED_UNIT, reads_drafter=True),
    "spec_cascade.token_v2": _token_cascade(rules.token_v2, _SIGNED_UNIT),
    "spec_cascade.token_v3": _token_cascade(rules.token_v3, _ANY),
    "custom": Kind(
        Execution.SPECULATIVE,
        None,
        {"target": Function(), "alpha": _ANY},
        _about(Custom),
        optional=("alpha",),
    ),
}

PARAMETERS = tuple(field.name for field in fields(Strategy) if field.name != "use")


def target_of(strategy: Strategy) -> Target:
    """What a decoded strategy samples from. Raises `StrategyError` for a custom one not found."""
    if strategy.target is not None:
        return _custom(strategy.target)
    target = KINDS[strategy.use].target
    if target is None:
        raise StrategyError(f"{strategy.use} is not decoded itself")
    return target


@cache
def _custom(name: str) -> Custom:
    try:
        return Custom(imported(name))
    except CustomCodeError as error:
        raise StrategyError(f"target is '{name}', but {error}") from error


def sweep(use: str, given: Mapping[str, object]) -> list[Strategy]:
    """The strategies of one line of a job: a list for a parameter is a sweep.

    Args:
        given: parameters by name; None is the same as not given.

    Raises:
        StrategyError: in one sentence that names the parameter and the remedy.
    """
    if use not in KINDS:
        near = difflib.get_close_matches(use, KINDS, n=1)
        remedy = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(KINDS)}"
        raise StrategyError(f"use is '{use}', which is not a strategy; {remedy}")
    values = [_values(use, name, given.get(name)) for name in PARAMETERS]
    strategies = [
        Strategy(use, **dict(zip(PARAMETERS, chosen, strict=True))) for chosen in product(*values)
    ]
    for strategy in strategies:
        if strategy.target is not None:
            target_of(strategy)
    return strategies


def _values(use: str, name: str, given: Any) -> Sequence[Any]:
    """The checked values of one parameter, one for each strategy of the sweep."""
    allowed = KINDS[use].takes.get(name)
    if allowed is None:
        if given is not None:
            raise StrategyError(f"{name} is {given}, but {use} takes no {name}; remove it")
        return [None]
    if given is None and isinstance(allowed, OneOf):
        return [allowed.options[0]]
    if given is None and name in KINDS[use].optional:
        return [None]
    if given is None or given == []:
        raise StrategyError(f"{name} is missing; {use} needs {allowed}, or a list for a sweep")
    values = given if isinstance(given, list) else [given]
    for value in values:
        if value not in allowed:
            raise StrategyError(f"{name} is {value}, but {use} needs {allowed}")
    return [float(v) if isinstance(v, float | int) else v for v in values]
