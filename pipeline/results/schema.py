"""The rows' one Arrow schema: every column's name, type, unit and meaning, with a version.

Every file has exactly this schema, also where a column is all null, so that a folder of files is
one table. The names are a contract with the people who query them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import pyarrow as pa

from pipeline.config import JobError
from pipeline.records import Counts

SCHEMA_VERSION = 1
PROJECT = "speccascade"

Group = Literal[
    "identity",
    "text",
    "tokens",
    "quality",
    "counts",
    "risk",
    "trace",
    "outcome",
    "cost",
    "measured",
]


class MetricColumn(Protocol):
    """What the schema needs to know of a metric."""

    @property
    def name(self) -> str:
        """The name of the metric and of its column."""

    @property
    def description(self) -> str:
        """One sentence on what it measures."""

    @property
    def scale(self) -> str:
        """The range of its values, for example `0 to 100`."""

    @property
    def higher_is_better(self) -> bool:
        """Which end of the scale is good."""


@dataclass(frozen=True)
class Column:
    """One column: its type, and what a reader must know to use it."""

    name: str
    type: pa.DataType
    description: str
    unit: str = ""
    required: bool = False

    def field(self, group: Group) -> pa.Field[Any]:
        """The Arrow field, with its meaning in the field metadata."""
        metadata = {"description": self.description, "unit": self.unit, "group": group}
        return pa.field(self.name, self.type, nullable=not self.required, metadata=metadata)


_TEXT, _REAL, _WHOLE = pa.string(), pa.float64(), pa.int64()
_IDS = pa.list_(pa.int32())

IDENTITY = (
    Column("job", _TEXT, "name of the job", required=True),
    Column("shard", _WHOLE, "shard that the example belongs to", required=True),
    Column("example_id", _TEXT, "id of the example: unique in the dataset", required=True),
    Column("repeat", _WHOLE, "which repetition, from 0; each has its own draws", required=True),
    Column("strategy", _TEXT, "the strategy's `use:` name", required=True),
    Column("alpha", _REAL, "trade-off parameter: larger means fewer deferrals"),
    Column("beta", _TEXT, "beta of lossy speculative decoding: a number, or `tuned`"),
    Column("normalize", _TEXT, "normalisation of the sequence probability"),
    Column("fallback", _REAL, "confidence below which BiLD stops drafting", "probability"),
    Column("rollback", _REAL, "loss above which BiLD rolls back", "nats"),
    Column("target", _TEXT, "`module:function` of a custom target"),
    Column("block_size", _WHOLE, "drafted tokens a round (the paper's gamma)", "tokens", True),
    Column("temperature", _REAL, "sampling temperature; 0 is greedy", required=True),
    Column("top_k", _WHOLE, "top-k truncation; null is none", "tokens"),
    Column("top_p", _REAL, "top-p truncation; null is none", "probability"),
    Column("min_p", _REAL, "min-p truncation; null is none", "probability"),
    Column("drafter_temperature", _REAL, "the drafter's, where it differs; null is the same"),
    Column("drafter_top_k", _WHOLE, "the drafter's, where its sampling differs", "tokens"),
    Column("drafter_top_p", _REAL, "the drafter's, where its sampling differs", "probability"),
    Column("drafter_min_p", _REAL, "the drafter's, where its sampling differs", "probability"),
    Column("bonus", _TEXT, "what the bonus token is drawn from", required=True),
    Column("seed", _WHOLE, "seed of the draws", required=True),
)
TEXT = (
    Column("prompt", _TEXT, "rendered prompt; null if it could not be rendered"),
    Column("references", pa.list_(_TEXT), "texts that the prediction is compared with"),
    Column("prediction", _TEXT, "decoded output; null if the row has an error"),
)
TOKENS = (
    Column("prompt_ids", _IDS, "token ids of the prompt; empty for a bad example", "token ids"),
    Column("output_ids", _IDS, "emitted token ids, also those before an error", "token ids"),
)
COUNTS = (
    Column("output_tokens", _WHOLE, "emitted tokens, with the end-of-text token", "tokens"),
    Column("drafter_calls", _WHOLE, "forward passes of the drafter on this sequence", "calls"),
    Column("verifier_calls", _WHOLE, "forward passes of the verifier on this sequence", "calls"),
    Column("verifier_tokens", _WHOLE, "positions that the verifier scored", "tokens"),
    Column("drafted", _WHOLE, "tokens that the drafter proposed", "tokens"),
    Column("accepted", _WHOLE, "drafted tokens that were emitted", "tokens"),
    Column("rejected", _WHOLE, "drafted tokens that another token replaced", "tokens"),
    Column("deferred", _WHOLE, "positions at which the rule deferred to the verifier", "tokens"),
    Column("bonus_tokens", _WHOLE, "tokens added after a block accepted whole", "tokens"),
    Column("rounds", _WHOLE, "drafts that were verified; 0 if not speculative", "rounds"),
    Column(
        "accepted_histogram",
        pa.list_(_WHOLE),
        "at index k the rounds that accepted k drafted tokens",
        "rounds",
    ),
)
RISK = (
    Column(
        "expected_rejected",
        _REAL,
        "sum of rejection probabilities over the judged positions (Lemma 3)",
        "tokens",
    ),
    Column(
        "expected_loss",
        _REAL,
        "plug-in 0-1 loss over the judged positions (eqs. 3 and 8 without cost terms)",
        "tokens",
    ),
)
TRACE = Column(
    "trace",
    pa.list_(
        pa.struct(
            [
                ("source", _TEXT),
                ("deferred", pa.bool_()),
                ("accepted", pa.bool_()),
                ("drafter_confidence", _REAL),
                ("verifier_confidence", _REAL),
                ("drafter_max", _REAL),
                ("verifier_max", _REAL),
                ("total_variation", _REAL),
            ]
        )
    ),
    "for each token who wrote it (draft, residual, bonus, verifier) and what both models thought",
)
OUTCOME = (
    Column(
        "finish_reason",
        _TEXT,
        "`stop` (end of text), `length`, `error` or `skipped`",
        required=True,
    ),
    Column("error_code", _TEXT, "stable code of the error or of skipping; null on success"),
    Column("error", _TEXT, "what went wrong, in a sentence; null on success"),
)
COST = (
    Column("modelled_seconds", _REAL, "time from step times, as if alone at batch 1", "seconds"),
)
MEASURED = (
    Column("attempts", _WHOLE, "how often the shard was started", "times", True),
    Column("wall_seconds", _REAL, "from the first draft to the last token, shared", "seconds"),
    Column("drafter", _TEXT, "worker that drafted"),
    Column("verifier", _TEXT, "worker that verified"),
    Column("node", _TEXT, "machine of the drafter"),
)

COUNT_NAMES = tuple(field.name for field in fields(Counts))
"""The columns that come straight from `records.Counts`."""

MEASURED_COLUMNS = tuple(column.name for column in COST + MEASURED)
"""Columns that differ between two runs of one job: times, places and attempts."""

_FIXED: tuple[tuple[Group, tuple[Column, ...]], ...] = (
    ("identity", IDENTITY),
    ("text", TEXT),
    ("tokens", TOKENS),
    ("counts", COUNTS),
    ("risk", RISK),
    ("outcome", OUTCOME),
    ("cost", COST),
    ("measured", MEASURED),
)

DETERMINED_COLUMNS = tuple(
    column.name
    for group, columns in _FIXED
    if group not in ("cost", "measured")
    for column in columns
)
"""Columns that the job decides, metrics aside: equal in any two runs of it."""


def row_schema(metrics: Iterable[MetricColumn] = (), trace: bool = False) -> pa.Schema:
    """The schema of every row file of a job: the fixed columns, then its metrics in job order.

    The token trace is a column of jobs that ask for it.

    Raises:
        JobError: two metrics have one name, or a metric is named as a fixed column.
    """
    quality = [_metric_field(metric) for metric in metrics]
    schema_fields = [column.field(group) for group, columns in _FIXED for column in columns]
    if trace:
        schema_fields.append(TRACE.field("trace"))
    taken: set[str] = {field.name for field in schema_fields}
    for field in quality:
        if field.name in taken:
            raise JobError(f"metrics: '{field.name}' is listed twice or is the name of a column")
        taken.add(field.name)
    versions: dict[bytes | str, bytes | str] = {
        "project": PROJECT,
        "schema_version": str(SCHEMA_VERSION),
    }
    return pa.schema([*schema_fields, *quality], metadata=versions)


def metric_names(schema: pa.Schema) -> list[str]:
    """The metric columns of rows, in job order."""
    return [field.name for field in schema if _group(field) == b"quality"]


def determined_columns(schema: pa.Schema) -> list[str]:
    """The columns, metrics included, that are equal in any two runs of one job."""
    return [name for name in schema.names if name not in MEASURED_COLUMNS]


def higher_is_better(field: pa.Field[Any]) -> bool:
    """Which end of a metric column is good."""
    return bool((field.metadata or {}).get(b"better") != b"lower")


def _metric_field(metric: MetricColumn) -> pa.Field[Any]:
    better = "higher" if metric.higher_is_better else "lower"
    metadata = {
        "description": f"{metric.description}; {better} is better",
        "unit": metric.scale,
        "group": "quality",
        "better": better,
    }
    return pa.field(metric.name, _REAL, metadata=metadata)


def _group(field: pa.Field[Any]) -> bytes:
    return (field.metadata or {}).get(b"group", b"")
