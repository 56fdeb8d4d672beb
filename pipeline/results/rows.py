"""From outcomes to rows: each (example, repeat, strategy) once, in job order, numbers adding up.

A row with an error has nulls where a number would be stale: no prediction, no quality; a bad
example has no counts either. A failure to add up is a bug and raises `InvariantError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline.records import (
    SKIPPED,
    Example,
    Outcome,
    RowError,
    Setting,
    Shard,
    ShardResult,
    StepTimes,
    Strategy,
)
from pipeline.redaction import redact
from pipeline.results.schema import MetricColumn, row_schema

PARAMETER_COLUMNS = tuple(field.name for field in fields(Strategy) if field.name != "use")
"""The columns that hold a strategy's parameters; its `use:` name is in `strategy`."""


class Key(NamedTuple):
    """What a row is the row of; `setting` is an index into the run's settings."""

    example_id: str
    setting: int
    repeat: int
    strategy: Strategy

    def __str__(self) -> str:
        """As an error names it."""
        return (
            f"example {self.example_id!r}, setting {self.setting}, repeat {self.repeat}, "
            f"strategy {self.strategy.label}"
        )


class InvariantError(AssertionError):
    """A row whose numbers do not add up: names the example, the strategy and the invariant."""


@dataclass(frozen=True)
class RowLayout:
    """What all rows of a run share. `strategies` and `metrics` are in job order."""

    job: str
    settings: tuple[Setting, ...]
    strategies: tuple[Strategy, ...]
    metrics: tuple[MetricColumn, ...] = ()
    step_times: StepTimes | None = None
    trace: bool = False

    @property
    def schema(self) -> pa.Schema:
        """The schema of the run's row files."""
        return row_schema(self.metrics, self.trace)


@dataclass(frozen=True)
class FinishedShard:
    """A shard with all that becomes its rows.

    `predictions` and each list in `scores` stand in the order of `result.outcomes`; a failed
    outcome has None there.
    """

    shard: Shard
    result: ShardResult
    predictions: Sequence[str | None]
    scores: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    attempts: int = 1


def shard_table(layout: RowLayout, finished: FinishedShard) -> pa.Table:
    """The rows of one shard in dataset order, then setting, repeat and strategy.

    Raises:
        InvariantError: an outcome is missing, doubled or unasked for, or its counts do not add up.
    """
    places = _places(finished.result.outcomes)
    wanted = _expected(layout, finished.shard)
    rows = [_row(layout, finished, places, example, key) for example, key in wanted]
    if places:
        raise InvariantError(f"{next(iter(places))}: an outcome that was not asked for")
    return pa.Table.from_pylist(rows, schema=layout.schema)


def strategy_of(row: Mapping[str, Any]) -> Strategy:
    """The strategy of a row, from its identity columns: what `shard_table` wrote, read back."""
    given = {name: row[name] for name in PARAMETER_COLUMNS}
    if given["beta"] not in (None, "tuned"):
        given["beta"] = float(given["beta"])
    return Strategy(row["strategy"], **given)


def check_outcome(outcome: Outcome, max_new_tokens: int | None = None) -> None:
    """Hold an outcome to what must be true of it. Raises `InvariantError`."""
    for invariant, holds in INVARIANTS.items():
        if not holds(outcome):
            raise InvariantError(f"{_key(outcome)}: not true that {invariant}; {outcome}")
    if max_new_tokens is not None and len(outcome.output_ids) > max_new_tokens:
        raise InvariantError(f"{_key(outcome)}: more than {max_new_tokens} tokens; {outcome}")


def _weighted(histogram: Sequence[int]) -> int:
    return sum(length * rounds for length, rounds in enumerate(histogram))


def _adds_up(outcome: Outcome) -> bool:
    counts = outcome.counts
    emitted = counts.accepted + counts.rejected + counts.bonus_tokens
    return counts.rounds == 0 or len(outcome.output_ids) == emitted


INVARIANTS: dict[str, Callable[[Outcome], bool]] = {
    "drafted >= accepted": lambda o: o.counts.drafted >= o.counts.accepted,
    "accepted + rejected <= drafted": lambda o: (
        o.counts.accepted + o.counts.rejected <= o.counts.drafted
    ),
    "accepted_histogram sums to rounds": lambda o: (
        sum(o.counts.accepted_histogram) == o.counts.rounds
    ),
    "accepted_histogram, weighted, sums to accepted": lambda o: (
        _weighted(o.counts.accepted_histogram) == o.counts.accepted
    ),
    "output_tokens == accepted + rejected + bonus_tokens": _adds_up,
    "trace, where kept, has one entry a token": lambda o: len(o.trace) in (0, len(o.output_ids)),
    "no count is negative": lambda o: min(_whole_numbers(o)) >= 0,
    "finish_reason is error exactly if there is an error": lambda o: (
        (o.finish_reason == "error") == (o.error is not None)
    ),
}


def _whole_numbers(outcome: Outcome) -> list[int]:
    counts = vars(outcome.counts)
    single = (number for name, number in counts.items() if name != "accepted_histogram")
    return [*outcome.counts.accepted_histogram, *single]


def _places(outcomes: Sequence[Outcome]) -> dict[Key, int]:
    places: dict[Key, int] = {}
    for place, outcome in enumerate(outcomes):
        if _key(outcome) in places:
            raise InvariantError(f"{_key(outcome)}: two outcomes")
        places[_key(outcome)] = place
    return places


def _expected(layout: RowLayout, shard: Shard) -> Iterator[tuple[Example, Key]]:
    for example in shard.examples:
        for number, setting in enumerate(layout.settings):
            for repeat in range(setting.repeats):
                for strategy in layout.strategies:
                    yield example, Key(example.example_id, number, repeat, strategy)


def _row(
    layout: RowLayout,
    finished: FinishedShard,
    places: dict[Key, int],
    example: Example,
    key: Key,
) -> dict[str, Any]:
    """One row; the outcome it uses is taken out of `places`."""
    shared = {
        **_identity(layout, finished.shard.index, key),
        **_example_columns(example),
        "attempts": finished.attempts,
    }
    if example.error is not None:
        reason = "skipped" if example.error.code == SKIPPED else "error"
        return {**shared, "output_ids": [], **_ending(reason, example.error)}
    place = places.pop(key, None)
    if place is None:
        raise InvariantError(f"{key}: no outcome")
    outcome = finished.result.outcomes[place]
    check_outcome(outcome, layout.settings[key.setting].max_new_tokens)
    return {
        **shared,
        **_outcome_columns(outcome),
        **_judged(finished, place, outcome),
        **_measured(layout, finished.result, outcome),
    }


def _identity(layout: RowLayout, shard: int, key: Key) -> dict[str, Any]:
    setting, strategy = layout.settings[key.setting], key.strategy
    drafting = vars(setting.drafter_sampling) if setting.drafter_sampling else {}
    beta = strategy.beta
    return {
        "job": layout.job,
        "shard": shard,
        "repeat": key.repeat,
        "strategy": strategy.use,
        **{name: value for name, value in vars(strategy).items() if name != "use"},
        "beta": f"{beta:g}" if isinstance(beta, int | float) else beta,
        "block_size": setting.block_size,
        **vars(setting.sampling),
        **{f"drafter_{name}": value for name, value in drafting.items()},
        "bonus": setting.bonus,
        "seed": setting.seed,
    }


def _example_columns(example: Example) -> dict[str, Any]:
    return {
        "example_id": example.example_id,
        "prompt": example.prompt,
        "references": list(example.references),
        "prompt_ids": list(example.prompt_ids),
    }


def _outcome_columns(outcome: Outcome) -> dict[str, Any]:
    return {
        "output_ids": list(outcome.output_ids),
        "output_tokens": len(outcome.output_ids),
        **vars(outcome.counts),
        **_risk(outcome),
        "trace": [vars(token) for token in outcome.trace],
        **_ending(outcome.finish_reason, outcome.error),
    }


def _risk(outcome: Outcome) -> dict[str, float | None]:
    """Null where nothing was judged by acceptance, or the target does not choose between models."""
    judged = outcome.counts.rounds > 0
    return {
        name: value if judged and not math.isnan(value) else None
        for name, value in vars(outcome.risk).items()
    }


def _ending(finish_reason: str, error: RowError | None) -> dict[str, Any]:
    return {
        "finish_reason": finish_reason,
        "error_code": error.code if error else None,
        "error": redact(error.message) if error else None,
    }


def _judged(finished: FinishedShard, place: int, outcome: Outcome) -> dict[str, Any]:
    """Prediction and quality; nothing of a failed outcome is judged."""
    if outcome.error is not None:
        return {}
    scores = {name: values[place] for name, values in finished.scores.items()}
    return {"prediction": finished.predictions[place], **scores}


def _measured(layout: RowLayout, result: ShardResult, outcome: Outcome) -> dict[str, Any]:
    return {
        "modelled_seconds": _modelled_seconds(layout.step_times, outcome),
        "wall_seconds": outcome.wall_seconds,
        "drafter": result.drafter,
        "verifier": result.verifier,
        "node": result.node,
    }


def _modelled_seconds(times: StepTimes | None, outcome: Outcome) -> float | None:
    if times is None:
        return None
    counts = outcome.counts
    drafting = counts.drafter_calls * times.drafter_seconds
    return drafting + counts.verifier_calls * times.verifier_seconds


def _key(outcome: Outcome) -> Key:
    return Key(outcome.example_id, outcome.setting, outcome.repeat, outcome.strategy)
