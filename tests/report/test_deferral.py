"""Deferral and its risk, from rows alone, against sums done by hand.

Each of these faults in `report/deferral.py` fails a test here: bonus tokens counted as judged; eq. 8
charged for deferrals or eq. 3 for rejections; rows with an error summed; a gap error of the mean
instead of the sum; BiLD's fallbacks over the judged positions alone.
"""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from pipeline.records import Counts, Outcome, Risk, Shard, ShardResult, Strategy
from pipeline.report.deferral import DEFERRAL, deferral
from pipeline.report.summary import summarise
from pipeline.report.table import deferral_table, print_summary
from pipeline.results.rows import FinishedShard, RowLayout, shard_table
from pipeline.results.writer import write_shard
from tests.results.runs import DRAFTER, LAYOUT, OPT, VERIFIER, failed, good

LOSSY = Strategy("lossy_spec_decode", 0.1, 1.0)
SPEC = Strategy("spec_decode")
TOKEN = Strategy("token_cascade.chow", 0.3)
BILD = Strategy("bild", fallback=0.6, rollback=2.0)
NAN = float("nan")

# accepted 2, rejected 1, deferred 2, bonus 1: four tokens, three of them judged
TWO_ROUNDS = Counts(6, 2, 7, 6, 2, 1, 2, 1, 2, (1, 0, 1))
ALONE = Counts(drafter_calls=4, verifier_calls=1, verifier_tokens=1, deferred=1)
# one judged token, three fallbacks, all of them deferrals
FALLBACKS = Counts(4, 3, 4, 1, 1, 0, 3, 3, 3, (2, 1))

KINDS: dict[Strategy, tuple[Counts, tuple[Risk, Risk]]] = {
    OPT: (TWO_ROUNDS, (Risk(0.5, 0.75), Risk(1.25, 0.6))),
    LOSSY: (TWO_ROUNDS, (Risk(0.4, NAN), Risk(0.8, NAN))),
    SPEC: (TWO_ROUNDS, (Risk(1.0, 0.2), Risk(1.0, 0.3))),
    BILD: (FALLBACKS, (Risk(0.0, 0.1), Risk(0.0, 0.1))),
    TOKEN: (ALONE, (Risk(), Risk())),
    DRAFTER: (Counts(drafter_calls=4), (Risk(), Risk())),
    VERIFIER: (Counts(verifier_calls=4, verifier_tokens=4, deferred=4), (Risk(), Risk())),
}


def outcomes() -> list[Outcome]:
    """Two good examples, and a third that fails after its tokens, with a risk that must not count."""
    found = [
        Outcome(f"{number}", 0, strategy, (1, 2, 3, 0), "stop", counts, risk=risks[number])
        for strategy, (counts, risks) in KINDS.items()
        for number in (0, 1)
    ]
    last = [replace(outcome, example_id="2", risk=Risk(3.0, 3.0)) for outcome in found[::2]]
    return [*found, *(failed(outcome) for outcome in last)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    layout = RowLayout("demo", LAYOUT.settings, tuple(KINDS))
    found = outcomes()
    shard = Shard(0, tuple(good(f"{number}") for number in range(3)))
    result = ShardResult(0, tuple(found), "drafter-0", "verifier-0", "node")
    texts = [None if outcome.error else "text" for outcome in found]
    write_shard(tmp_path, 0, shard_table(layout, FinishedShard(shard, result, texts)))
    return tmp_path


def line(run: Path, strategy: Strategy) -> dict[str, Any]:
    found = next(one for one in summarise(run).to_pylist() if one["label"] == strategy.label)
    return {name: found[name] for name in DEFERRAL}


def test_a_cascade_has_all_rates_and_both_risks(run: Path) -> None:
    gaps = (1 - 0.5, 1 - 1.25)
    assert line(run, OPT) == pytest.approx(
        {
            "judged": 6,
            "deferral_rate": 4 / 6,
            "rejection_rate": 2 / 6,
            "expected_rejection_rate": 1.75 / 6,
            "rejection_gap_error": math.hypot(*gaps) / 6,
            "deferral_risk": (1.35 + 0.2 * 4) / 6,
            "speculative_risk": (1.35 + 0.2 * 1.75) / 6,
        }
    )


def test_a_target_without_a_choice_has_rejections_and_no_risk(run: Path) -> None:
    lossy = line(run, LOSSY)
    assert lossy["rejection_rate"] == pytest.approx(2 / 6)
    assert lossy["expected_rejection_rate"] == pytest.approx(1.2 / 6)
    unknown = ("deferral_rate", "deferral_risk", "speculative_risk")
    assert [lossy[name] for name in unknown] == [None] * 3


def test_a_strategy_without_alpha_has_no_risk(run: Path) -> None:
    for strategy in (SPEC, BILD):
        found = line(run, strategy)
        assert (found["deferral_risk"], found["speculative_risk"]) == (None, None)
        assert found["expected_rejection_rate"] is not None


def test_what_is_not_judged_has_a_deferral_rate_alone(run: Path) -> None:
    for strategy, rate in ((TOKEN, 1 / 4), (DRAFTER, 0.0), (VERIFIER, 1.0)):
        found = line(run, strategy)
        assert found.pop("deferral_rate") == rate
        assert found.pop("judged") == 0
        assert set(found.values()) == {None}


def test_a_fallback_is_a_deferral_at_a_position_of_its_own(run: Path) -> None:
    assert line(run, BILD)["deferral_rate"] == pytest.approx(3 / 4)


def test_the_gap_error_is_the_spread_of_rejected_minus_expected() -> None:
    draws = np.random.default_rng(5)
    chances = draws.uniform(0, 0.6, (4000, 5))
    rejected = (draws.uniform(size=chances.shape) < chances).sum(axis=1)
    rows = pd.DataFrame({"rejected": rejected, "expected_rejected": chances.sum(axis=1)})
    rows["expected_loss"] = 0.0
    totals = {"accepted": chances.size - int(rejected.sum()), "rejected": int(rejected.sum())}
    totals |= {"deferred": 0, "output_tokens": chances.size, "bonus_tokens": 0}
    found = deferral(rows, totals, {"alpha": 0.1, "fallback": None})
    exact = math.sqrt((chances * (1 - chances)).sum()) / chances.size
    assert found["rejection_gap_error"] == pytest.approx(exact, rel=0.05)
    gap = found["rejection_rate"] - found["expected_rejection_rate"]
    assert abs(gap) < 4 * found["rejection_gap_error"]


def test_every_column_says_its_unit_and_meaning(run: Path) -> None:
    schema = summarise(run).schema
    for name, (unit, meaning) in DEFERRAL.items():
        metadata = schema.field(name).metadata or {}
        assert (metadata[b"unit"].decode(), metadata[b"description"].decode()) == (unit, meaning)


def test_the_second_table_has_the_judged_strategies_alone(run: Path) -> None:
    stream = io.StringIO()
    print_summary(summarise(run), Console(file=stream))
    table = stream.getvalue().split("Deferral and its risk")[1]
    cells = {
        row[0]: row[1:]
        for text in table.splitlines()
        if text.startswith("│")
        for row in [[cell.strip() for cell in text.strip("│").split("│")]]
    }
    assert list(cells) == [strategy.label for strategy in (OPT, LOSSY, SPEC, BILD)]
    assert cells[OPT.label] == ["6", "0.667", "0.333", "0.292 ± 0.093", "0.358", "0.283"]
    assert cells[LOSSY.label][-2:] == ["-", "-"]


def test_no_second_table_where_nothing_is_judged(tmp_path: Path) -> None:
    layout = RowLayout("demo", LAYOUT.settings, (DRAFTER,))
    found = (Outcome("0", 0, DRAFTER, (1, 0), "stop", Counts(drafter_calls=2)),)
    result = ShardResult(0, found, "drafter-0", "verifier-0", "node")
    finished = FinishedShard(Shard(0, (good("0"),)), result, ["text"])
    write_shard(tmp_path, 0, shard_table(layout, finished))
    assert deferral_table(summarise(tmp_path)) is None
