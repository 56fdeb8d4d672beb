"""From rows to one line a strategy: quality, cost a token, acceptance.

Rates are ratios of sums over the rows without an error, repeats together; only
`acceptance_per_example` is a mean of the rows' own ratios. A rate without a denominator is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from pipeline.config import JobError
from pipeline.quality.metrics import Metric, corpus_value, load_metrics
from pipeline.results.schema import COUNT_NAMES, metric_names
from pipeline.results.writer import finished_shards, read_rows, rows_schema

STRATEGY_KEYS = ("strategy", "alpha", "beta", "normalize", "fallback", "rollback")
SETTING_KEYS = ("job", "block_size", "temperature", "top_k", "top_p", "min_p", "bonus")

RATES = {
    "verifier_calls_per_token": "forward passes of the verifier an emitted token",
    "verifier_tokens_per_token": "positions the verifier scored an emitted token",
    "drafter_calls_per_token": "forward passes of the drafter an emitted token",
    "acceptance": "share of all drafted tokens that were accepted",
    "acceptance_per_example": "the same for each row that drafted, then their mean",
    "deferral_rate": "share of the judged positions at which the rule deferred",
    "accepted_per_round": "accepted tokens a round",
}
"""The rates of the summary and what they mean."""

_KEYS = [*SETTING_KEYS, *STRATEGY_KEYS]
_SUMMED = ["output_tokens", *(name for name in COUNT_NAMES if name != "accepted_histogram")]
_TEXTS = ["prediction", "references"]


def summarise(output: Path) -> pa.Table:
    """One line for each strategy in job order, from the row files of `output` alone.

    Raises:
        JobError: no shard is finished yet.
    """
    if not finished_shards(output):
        raise JobError(f"{output} holds no finished shard; run the job first")
    schema = rows_schema(output)
    metrics = load_metrics(metric_names(schema))
    texts = _TEXTS if any(metric.pooled for metric in metrics) else []
    columns = [*_KEYS, *_SUMMED, *metric_names(schema), "error_code", *texts]
    rows = read_rows(output, columns).to_pandas()
    groups = rows.groupby(_KEYS, dropna=False, sort=False)
    lines = [_line(dict(zip(_KEYS, key, strict=True)), group, metrics) for key, group in groups]
    return pa.Table.from_pylist(lines, schema=_summary_schema(schema))


def _summary_schema(rows: pa.Schema) -> pa.Schema:
    """Keys, metrics and totals as in the rows, with what the summary adds."""
    whole = [pa.field(name, pa.int64()) for name in ("rows", "errors")]
    rates = [
        pa.field(name, pa.float64(), metadata={"description": text}) for name, text in RATES.items()
    ]
    kept = {name: rows.field(name) for name in [*_KEYS, *metric_names(rows), *_SUMMED]}
    quality = [kept.pop(name) for name in metric_names(rows)]
    keys = [kept.pop(name) for name in _KEYS]
    label = pa.field("label", pa.string())
    return pa.schema([label, *keys, *whole, *quality, *rates, *kept.values()])


def _line(key: dict[str, Any], group: pd.DataFrame, metrics: Sequence[Metric]) -> dict[str, Any]:
    known = {name: None if pd.isna(value) else value for name, value in key.items()}
    good = group[group["error_code"].isna()]
    totals = {name: int(good[name].sum()) for name in _SUMMED}
    return {
        "label": _label(known),
        **known,
        "rows": len(group),
        "errors": len(group) - len(good),
        **{metric.name: _quality(metric, good) for metric in metrics},
        **_rates(totals),
        "acceptance_per_example": _mean_acceptance(good),
        **totals,
    }


def _label(key: dict[str, Any]) -> str:
    """The strategy as people write it, for example `spec_cascade.opt(alpha=0.2)`."""
    given = [(name, key[name]) for name in STRATEGY_KEYS[1:] if key[name] is not None]
    shown = [f"{name}={value if isinstance(value, str) else f'{value:g}'}" for name, value in given]
    return f"{key['strategy']}({', '.join(shown)})" if shown else str(key["strategy"])


def _quality(metric: Metric, good: pd.DataFrame) -> float | None:
    if metric.pooled:
        references = [list(texts) for texts in good["references"]]
        return corpus_value(metric, list(good["prediction"]), references)
    mean = float(good[metric.name].mean())
    return None if pd.isna(mean) else mean


def _rates(totals: dict[str, int]) -> dict[str, float | None]:
    tokens = totals["output_tokens"]
    return {
        "verifier_calls_per_token": _ratio(totals["verifier_calls"], tokens),
        "verifier_tokens_per_token": _ratio(totals["verifier_tokens"], tokens),
        "drafter_calls_per_token": _ratio(totals["drafter_calls"], tokens),
        "acceptance": _ratio(totals["accepted"], totals["drafted"]),
        # A bonus token follows the block: no rule judged it.
        "deferral_rate": _ratio(totals["deferred"], tokens - totals["bonus_tokens"]),
        "accepted_per_round": _ratio(totals["accepted"], totals["rounds"]),
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean_acceptance(good: pd.DataFrame) -> float | None:
    drafted = good[good["drafted"] > 0]
    return float((drafted["accepted"] / drafted["drafted"]).mean()) if len(drafted) else None
