"""Rows of the trained pair, token for token and count for count, from an independent implementation.

The reference runs `transformers` without a cache, one example, one strategy and one token at a time,
in float64 probabilities. It shares with the pipeline nothing but the uniforms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSeq2SeqLM

from pipeline.config import load_job
from pipeline.records import Setting, Strategy
from pipeline.results.rows import RowLayout
from pipeline.results.schema import COUNT_NAMES
from pipeline.results.writer import read_rows
from pipeline.run import Prepared, prepare, run
from tests.fleet.test_same_rows import Silent
from tests.reference import Models, decode, seq2seq_model

REPOSITORY = Path(__file__).parents[2]
STRATEGIES = (
    "strategies=[drafter, verifier, spec_decode, {use: sequence_cascade.chow, alpha: 0.6}, "
    "{use: token_cascade.chow, alpha: [0.1, 0.4]}, {use: token_cascade.entropy, alpha: 0.8}, "
    "{use: oracle_cascade.diff, alpha: 0.1}, {use: oracle_cascade.diff_log, alpha: 0.1}, "
    "{use: lossy_spec_decode, alpha: 0.4, beta: [1, tuned]}, {use: bild_star, alpha: 1.0}, "
    "{use: spec_cascade.chow, alpha: 0.3}, {use: spec_cascade.diff, alpha: [-0.1, 0.1]}, "
    "{use: spec_cascade.opt, alpha: [0.2, 0.6]}, {use: spec_cascade.chow_log, alpha: 0.8}, "
    "{use: spec_cascade.diff_log, alpha: 0.1}, {use: spec_cascade.opt_log, alpha: 0.4}, "
    "{use: spec_cascade.token_v1, alpha: 0.3}, {use: spec_cascade.token_v2, alpha: 0.3}, "
    "{use: spec_cascade.token_v3, alpha: [0.3, 0.9]}]"
)


def prepared(pair: str, output: Path, *overrides: str) -> Prepared:
    return prepare(
        load_job(f"jobs/{pair}.yaml", ["fleet=local", f"output={output}", STRATEGIES, *overrides])
    )


def models_of(job: Prepared) -> Models:
    """Both models as plain `transformers` ones, apart from those the pipeline loads."""
    drafter, verifier = (
        AutoModelForSeq2SeqLM.from_pretrained(model.path, dtype="float32").eval()
        for model in (job.job.models.drafter, job.job.models.verifier)
    )
    vocabulary = job.pairing.vocabulary
    return Models(seq2seq_model(drafter, vocabulary), seq2seq_model(verifier, vocabulary))


def differences(row: dict[str, Any], expected: Any) -> dict[str, Any]:
    wanted = {
        "output_ids": list(expected.output_ids),
        "finish_reason": expected.finish_reason,
        **{name: getattr(expected.counts, name) for name in COUNT_NAMES},
    }
    wanted["accepted_histogram"] = list(wanted["accepted_histogram"]) if row["rounds"] else []
    return {name: (row[name], value) for name, value in wanted.items() if row[name] != value}


def strategy_of(row: dict[str, Any], layout: RowLayout | Prepared) -> Strategy:
    """The strategy of a row, by its parameters."""

    def key(strategy: Strategy) -> tuple[Any, ...]:
        beta = strategy.beta
        return (strategy.use, strategy.alpha, f"{beta:g}" if isinstance(beta, float) else beta)

    by_key = {key(strategy): strategy for strategy in layout.strategies}
    return by_key[row["strategy"], row["alpha"], row["beta"]]


@pytest.mark.parametrize(
    ("pair", "limit", "decoding"),
    [
        ("g2p", 6, ["decoding.temperature=1"]),
        ("g2p", 6, ["decoding.temperature=0", "decoding.block_size=3"]),
        ("g2p", 4, ["decoding.temperature=0.6", "decoding.top_p=0.8", "decoding.bonus=target"]),
        pytest.param("demo", 4, ["decoding.temperature=1"], marks=pytest.mark.slow),
    ],
)
def test_rows_are_those_of_the_reference(
    pair: str, limit: int, decoding: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    job = prepared(pair, tmp_path, f"dataset.limit={limit}", *decoding)
    run(job, Silent())
    models, setting = models_of(job), job.settings[0]
    assert isinstance(setting, Setting)
    rows = read_rows(tmp_path).to_pylist()
    assert len(rows) == limit * len(job.strategies)
    for row in rows:
        strategy = strategy_of(row, job)
        expected = decode(models, tuple(row["prompt_ids"]), row["example_id"], 0, strategy, setting)
        assert differences(row, expected) == {}, strategy.label
