"""Rows: one for each (example, repeat, strategy), numbers that add up, nulls where one is not known."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from pipeline.config import JobError
from pipeline.records import Counts, Outcome, Setting, Shard, ShardResult, StepTimes
from pipeline.results.rows import (
    FinishedShard,
    InvariantError,
    check_outcome,
    shard_table,
)
from pipeline.results.schema import (
    COUNT_NAMES,
    DETERMINED_COLUMNS,
    MEASURED_COLUMNS,
    determined_columns,
    metric_names,
    row_schema,
)
from tests.results.runs import (
    DRAFTER,
    LAYOUT,
    LOSSY,
    OPT,
    VERIFIER,
    FakeMetric,
    bad,
    failed,
    good,
    outcome,
    shard_outcomes,
    table,
)

CONTRACT = [
    *("job", "shard", "example_id", "repeat", "strategy", "alpha", "beta", "normalize"),
    *("fallback", "rollback", "target", "block_size", "temperature", "top_k", "top_p", "min_p"),
    *("drafter_temperature", "drafter_top_k", "drafter_top_p", "drafter_min_p", "bonus"),
    *("seed", "prompt", "references", "prediction", "prompt_ids", "output_ids"),
    *("output_tokens", "drafter_calls", "verifier_calls", "verifier_tokens", "drafted"),
    *("accepted", "rejected", "deferred", "bonus_tokens", "rounds", "accepted_histogram"),
    *("expected_rejected", "expected_loss"),
    *("finish_reason", "error_code", "error", "modelled_seconds"),
    *("attempts", "wall_seconds", "drafter", "verifier", "node"),
]

SHARD = Shard(3, (good("a"), bad("b"), good("c")))


def test_the_column_names_are_the_contract() -> None:
    schema = row_schema([FakeMetric("bleu"), FakeMetric("chrf", higher_is_better=False)])
    assert schema.names == [*CONTRACT, "bleu", "chrf"]
    assert metric_names(schema) == ["bleu", "chrf"]
    assert set(DETERMINED_COLUMNS) | set(MEASURED_COLUMNS) == set(CONTRACT)
    assert not set(DETERMINED_COLUMNS) & set(MEASURED_COLUMNS)
    assert determined_columns(schema) == [*DETERMINED_COLUMNS, "bleu", "chrf"]


def test_every_field_says_what_it_means() -> None:
    schema = row_schema([FakeMetric("bleu")])
    assert schema.metadata == {b"project": b"speccascade", b"schema_version": b"1"}
    for field in schema:
        assert field.metadata[b"description"]
        assert b"unit" in field.metadata


@pytest.mark.parametrize("names", [["bleu", "bleu"], ["seed"]])
def test_a_metric_cannot_take_the_name_of_a_column(names: list[str]) -> None:
    with pytest.raises(JobError, match="metrics"):
        row_schema([FakeMetric(name) for name in names])


def test_rows_stand_in_job_order_however_the_outcomes_came() -> None:
    layout = replace(LAYOUT, settings=(replace(LAYOUT.settings[0], repeats=2),))
    outcomes = shard_outcomes(SHARD, layout)
    shuffled = random.Random(1).sample(outcomes, len(outcomes))
    rows = table(SHARD, shuffled, layout).select(["example_id", "repeat", "strategy"]).to_pylist()
    names = [strategy.use for strategy in layout.strategies]
    expected = [(e, r, s) for e in "abc" for r in (0, 1) for s in names]
    assert [tuple(row.values()) for row in rows] == expected


def test_a_row_says_what_was_asked_for_and_what_it_cost() -> None:
    row = table(SHARD).to_pylist()[2]
    asked = {"job": "demo", "shard": 3, "example_id": "a", "strategy": "spec_cascade.opt"}
    setting = {
        "alpha": 0.2,
        "beta": None,
        "block_size": 3,
        "temperature": 0.5,
        "top_k": 4,
        "seed": 7,
    }
    cost = {"output_tokens": 4, "verifier_calls": 2, "accepted_histogram": [1, 0, 1]}
    rest = {"prediction": "text 2", "references": ["one", "two"], "node": "node-a", "error": None}
    for name, value in {**asked, **setting, **cost, **rest, "modelled_seconds": None}.items():
        assert row[name] == value


def test_beta_is_a_number_or_tuned() -> None:
    layout = replace(LAYOUT, strategies=(LOSSY, replace(LOSSY, beta=1.0)))
    shard = Shard(0, (good("a"),))
    outcomes = [replace(outcome("a", LOSSY), strategy=s) for s in layout.strategies]
    assert table(shard, outcomes, layout).column("beta").to_pylist() == ["tuned", "1"]


def test_a_bad_example_has_one_error_row_for_each_strategy_and_no_numbers() -> None:
    rows = [row for row in table(SHARD).to_pylist() if row["example_id"] == "b"]
    assert [row["strategy"] for row in rows] == [strategy.use for strategy in LAYOUT.strategies]
    for row in rows:
        assert (row["finish_reason"], row["error_code"]) == ("error", "null_field")
        assert row["output_ids"] == row["prompt_ids"] == []
        empty = [*COUNT_NAMES, "output_tokens", "prompt", "prediction", "wall_seconds"]
        assert [row[name] for name in empty] == [None] * len(empty)


def test_a_lane_that_failed_midway_keeps_its_tokens_and_counts_but_no_quality() -> None:
    layout = replace(LAYOUT, metrics=(FakeMetric("bleu"),))
    shard = Shard(0, (good("a"),))
    outcomes = [failed(o) if o.strategy == OPT else o for o in shard_outcomes(shard)]
    rows = table(shard, outcomes, layout, {"bleu": [0.1, 0.2, 0.3, 0.4]}).to_pylist()
    assert [row["bleu"] for row in rows] == [0.1, 0.2, None, 0.4]
    assert (rows[2]["prediction"], rows[2]["error_code"]) == (None, "nan_logits")
    assert (rows[2]["output_ids"], rows[2]["drafted"]) == ([1, 2, 3, 0], 6)


def test_modelled_seconds_follow_from_the_calls() -> None:
    layout = replace(LAYOUT, step_times=StepTimes(0.5, 10.0))
    seconds = table(Shard(0, (good("a"),)), layout=layout).column("modelled_seconds").to_pylist()
    assert seconds == [2.0, 40.0, 23.0, 11.5]


FAULTS: dict[str, dict[str, Any]] = {
    "drafted >= accepted": {"drafted": 1},
    "accepted + rejected <= drafted": {"drafted": 2},
    "accepted_histogram sums to rounds": {"rounds": 3},
    "accepted_histogram, weighted, sums to accepted": {"accepted_histogram": (0, 1, 1)},
    "output_tokens == accepted + rejected + bonus_tokens": {"bonus_tokens": 2},
    "no count is negative": {"deferred": -1},
}


@pytest.mark.parametrize("invariant", FAULTS)
def test_numbers_that_do_not_add_up_are_not_written(invariant: str) -> None:
    right = outcome("a", OPT)
    check_outcome(right)
    wrong = replace(right, counts=replace(right.counts, **FAULTS[invariant]))
    outcomes = [wrong if o == right else o for o in shard_outcomes(SHARD)]
    with pytest.raises(InvariantError) as caught:
        table(SHARD, outcomes)
    for part in ("'a'", "spec_cascade.opt(alpha=0.2)", invariant):
        assert part in str(caught.value)


def test_an_error_without_its_reason_and_too_many_tokens_are_noticed() -> None:
    with pytest.raises(InvariantError, match="finish_reason"):
        check_outcome(replace(outcome("a", OPT), finish_reason="error"))
    with pytest.raises(InvariantError, match="more than 3 tokens"):
        check_outcome(outcome("a", OPT), max_new_tokens=3)


def test_the_mask_1011_counts_one_accepted_token() -> None:
    counts = Counts(4, 1, 5, drafted=4, accepted=1, rejected=1, rounds=1, accepted_histogram=(0, 1))
    check_outcome(Outcome("a", 0, OPT, (1, 2), "length", counts))
    three = replace(counts, accepted=3, accepted_histogram=(0, 0, 0, 1))
    with pytest.raises(InvariantError, match="output_tokens"):
        check_outcome(Outcome("a", 0, OPT, (1, 2), "length", three))


def test_no_outcome_is_lost_doubled_or_made_up() -> None:
    outcomes = shard_outcomes(SHARD)
    with pytest.raises(
        InvariantError, match=r"'c', setting 0, repeat 0, strategy lossy.*no outcome"
    ):
        table(SHARD, outcomes[:-1])
    with pytest.raises(InvariantError, match="two outcomes"):
        table(SHARD, [*outcomes, outcomes[0]])
    for extra in (outcome("z", DRAFTER), outcome("b", DRAFTER), outcome("a", VERIFIER, 1)):
        with pytest.raises(InvariantError, match="not asked for"):
            table(SHARD, [*outcomes, extra])


def test_an_empty_shard_still_has_the_schema() -> None:
    finished = FinishedShard(Shard(0, ()), ShardResult(0, (), "d", "v", "n"), [])
    rows = shard_table(replace(LAYOUT, settings=(Setting(1, 1),)), finished)
    assert rows.num_rows == 0
    assert rows.schema.equals(LAYOUT.schema, check_metadata=True)
