"""From rows to one line for each setting and strategy: quality, cost a token, acceptance, deferral.

Rates are ratios of sums over the rows without an error, repeats together; only
`acceptance_per_example` is a mean of the rows' own ratios. A rate without a denominator is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from pipeline.quality.metrics import Metric, corpus_value, load_metrics
from pipeline.records import SKIPPED
from pipeline.report.deferral import DEFERRAL, RISK_COLUMNS, deferral, ratio
from pipeline.report.reading import read_schema
from pipeline.report.settings import SETTING_KEYS
from pipeline.results.rows import PARAMETER_COLUMNS, strategy_of
from pipeline.results.schema import COUNT_NAMES, metric_names
from pipeline.results.writer import read_rows

RATES = {
    "verifier_calls_per_token": "forward passes of the verifier an emitted token",
    "verifier_tokens_per_token": "positions the verifier scored an emitted token",
    "drafter_calls_per_token": "forward passes of the drafter an emitted token",
    "acceptance": "share of all drafted tokens that were accepted",
    "acceptance_per_example": "the same for each row that drafted, then their mean",
    "accepted_per_round": "accepted tokens a round",
}
"""The rates of the summary and what they mean."""

_KEYS = [*SETTING_KEYS, "strategy", *PARAMETER_COLUMNS]
_SUMMED = ["output_tokens", *(name for name in COUNT_NAMES if name != "accepted_histogram")]
_TEXTS = ["prediction", "references"]


def summarise(output: Path, allow_custom_code: bool = False) -> pa.Table:
    """One line for each setting and strategy in job order, from the row files of `output` alone.

    Args:
        allow_custom_code: whether metrics that are not built in may be loaded, which runs their code.

    Raises:
        JobError: no shard is finished yet, or a metric may not be loaded.
    """
    schema = read_schema(output)
    metrics = load_metrics(metric_names(schema), allow_custom_code)
    texts = _TEXTS if any(metric.pooled for metric in metrics) else []
    columns = [*_KEYS, *_SUMMED, *RISK_COLUMNS, *metric_names(schema), "error_code", *texts]
    rows = read_rows(output, columns)
    # Grouped by hand: pandas knows neither whole numbers that may be null nor nulls in a key.
    places: dict[tuple[Any, ...], list[int]] = {}
    for place, key in enumerate(zip(*(rows.column(k).to_pylist() for k in _KEYS), strict=True)):
        places.setdefault(key, []).append(place)
    table = rows.to_pandas()
    lines = [
        _line(dict(zip(_KEYS, key, strict=True)), table.iloc[found], metrics)
        for key, found in places.items()
    ]
    return pa.Table.from_pylist(lines, schema=_summary_schema(schema))


def _summary_schema(rows: pa.Schema) -> pa.Schema:
    """Keys, metrics and totals as in the rows, with what the summary adds."""
    keys, quality, totals = (
        [rows.field(name) for name in names] for names in (_KEYS, metric_names(rows), _SUMMED)
    )
    whole = [pa.field(name, pa.int64()) for name in ("rows", "errors", "skipped")]
    rates = [
        pa.field(name, pa.float64(), metadata={"description": text}) for name, text in RATES.items()
    ]
    label = pa.field("label", pa.string())
    return pa.schema([label, *keys, *whole, *quality, *rates, *_deferral_fields(), *totals])


def _deferral_fields() -> list[pa.Field[Any]]:
    return [
        pa.field(
            name,
            pa.int64() if name == "judged" else pa.float64(),
            metadata={"description": text, "unit": unit},
        )
        for name, (unit, text) in DEFERRAL.items()
    ]


def _line(key: dict[str, Any], group: pd.DataFrame, metrics: Sequence[Metric]) -> dict[str, Any]:
    good = group[group["error_code"].isna()]
    skipped = int((group["error_code"] == SKIPPED).sum())
    totals = {name: int(good[name].sum()) for name in _SUMMED}
    return {
        "label": strategy_of(key).label,
        **key,
        "rows": len(group),
        "errors": len(group) - len(good) - skipped,
        "skipped": skipped,
        **{metric.name: _quality(metric, good) for metric in metrics},
        **_rates(totals),
        "acceptance_per_example": _mean_acceptance(good),
        **deferral(good, totals, key),
        **totals,
    }


def _quality(metric: Metric, good: pd.DataFrame) -> float | None:
    if metric.pooled:
        references = [list(texts) for texts in good["references"]]
        return corpus_value(metric, list(good["prediction"]), references)
    mean = float(good[metric.name].mean())
    return None if pd.isna(mean) else mean


def _rates(totals: dict[str, int]) -> dict[str, float | None]:
    tokens = totals["output_tokens"]
    return {
        "verifier_calls_per_token": ratio(totals["verifier_calls"], tokens),
        "verifier_tokens_per_token": ratio(totals["verifier_tokens"], tokens),
        "drafter_calls_per_token": ratio(totals["drafter_calls"], tokens),
        "acceptance": ratio(totals["accepted"], totals["drafted"]),
        "accepted_per_round": ratio(totals["accepted"], totals["rounds"]),
    }


def _mean_acceptance(good: pd.DataFrame) -> float | None:
    drafted = good[good["drafted"] > 0]
    return float((drafted["accepted"] / drafted["drafted"]).mean()) if len(drafted) else None
