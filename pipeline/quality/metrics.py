"""The table of metrics, and scoring with them.

A metric has a value for each row and one for the corpus. For BLEU and chrF the corpus value comes
from pooled statistics and is not the mean of the rows' values; for the others it is the mean.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from sacrebleu.metrics import BLEU, CHRF

from pipeline.config import JobError, one_line
from pipeline.quality import texts
from pipeline.quality.modules import BestReference, HubModule, References, Rouge, SacreBleu


class Module(Protocol):
    """What is asked of an `evaluate` module."""

    def compute(
        self, *, predictions: Sequence[str], references: References, per_row: bool
    ) -> dict[str, Any]:
        """`values`, one a row, or the value of the `corpus`."""


@dataclass(frozen=True)
class Metric:
    """A metric with what a reader of its numbers must know.

    `pooled` means that the corpus value needs the texts: it is not the mean of the rows' values.
    """

    name: str
    description: str
    scale: str
    higher_is_better: bool
    pooled: bool
    module: Module

    def row_values(self, predictions: Sequence[str], references: References) -> list[float]:
        """One value for each row; each row has at least one reference."""
        if not predictions:
            return []
        result = self.module.compute(predictions=predictions, references=references, per_row=True)
        return [float(value) for value in result["values"]]

    def corpus_value(self, predictions: Sequence[str], references: References) -> float | None:
        """The value of all rows together; None if there are none."""
        if not predictions:
            return None
        result = self.module.compute(predictions=predictions, references=references, per_row=False)
        return float(result["corpus"])


@dataclass(frozen=True)
class _Line:
    description: str
    scale: str
    module: Callable[[str], Module]
    higher_is_better: bool = True
    pooled: bool = False


_UNIT, _RATE, _PERCENT = "0 to 1", "0 or more", "0 to 100"
_HIGHEST = partial(BestReference, best=max)
_LOWEST = partial(BestReference, best=min)
_BLEU = partial(SacreBleu, sentence=BLEU(effective_order=True), corpus=BLEU())
_CHRF = partial(SacreBleu, sentence=CHRF(), corpus=CHRF())

METRICS: dict[str, _Line] = {
    "exact_match": _Line(
        "prediction equals a reference", _UNIT, partial(_HIGHEST, score=texts.exact_match)
    ),
    "token_f1": _Line(
        "F1 of the words, as in SQuAD", _UNIT, partial(_HIGHEST, score=texts.token_f1)
    ),
    "edit_error_rate": _Line(
        "word edits a reference word", _RATE, partial(_LOWEST, score=texts.edit_error_rate), False
    ),
    "char_error_rate": _Line(
        "character edits a reference character",
        _RATE,
        partial(_LOWEST, score=texts.char_error_rate),
        False,
    ),
    "bleu": _Line("BLEU of sacrebleu", _PERCENT, _BLEU, pooled=True),
    "chrf": _Line("chrF2 of sacrebleu", _PERCENT, _CHRF, pooled=True),
    "rouge1": _Line("ROUGE-1 F-measure", _UNIT, partial(Rouge, kind="rouge1")),
    "rouge2": _Line("ROUGE-2 F-measure", _UNIT, partial(Rouge, kind="rouge2")),
    "rougeL": _Line("ROUGE-L F-measure", _UNIT, partial(Rouge, kind="rougeL")),
}


def load_metrics(names: Iterable[str], allow_custom_code: bool = False) -> tuple[Metric, ...]:
    """The metrics of these names. One that is not built in is asked of `evaluate.load`.

    Args:
        allow_custom_code: whether that may run the code of the hub or of a local script.

    Raises:
        JobError: a name is not built in, and may not be loaded or is not served by the hub.
    """
    return tuple(_load(name, allow_custom_code) for name in names)


def score(
    metrics: Iterable[Metric], predictions: Sequence[str | None], references: References
) -> dict[str, list[float | None]]:
    """A column for each metric; None for a row without a prediction or a reference."""
    judged = _judged(predictions, references)
    kept_predictions, kept_references = _kept(judged, predictions, references)
    columns = {}
    for metric in metrics:
        values = iter(metric.row_values(kept_predictions, kept_references))
        columns[metric.name] = [next(values) if is_judged else None for is_judged in judged]
    return columns


def corpus_value(
    metric: Metric, predictions: Sequence[str | None], references: References
) -> float | None:
    """The value of all rows that have a prediction and a reference; None if none has."""
    judged = _judged(predictions, references)
    return metric.corpus_value(*_kept(judged, predictions, references))


def _judged(predictions: Sequence[str | None], references: References) -> list[bool]:
    pairs = zip(predictions, references, strict=True)
    return [prediction is not None and len(texts) > 0 for prediction, texts in pairs]


def _kept(
    judged: Sequence[bool], predictions: Sequence[str | None], references: References
) -> tuple[list[str], list[list[str]]]:
    rows = [
        (prediction, list(texts))
        for is_judged, prediction, texts in zip(judged, predictions, references, strict=True)
        if is_judged and prediction is not None
    ]
    return [prediction for prediction, _ in rows], [texts for _, texts in rows]


def _load(name: str, allow_custom_code: bool) -> Metric:
    if "://" in name:
        raise JobError(f"metrics: '{name}' is a URL; name a metric of the hub or a local script")
    if name not in METRICS and not allow_custom_code:
        raise JobError(
            f"metrics: '{name}' is not built in; {_remedy(name)} (code for it, from the hub or from "
            "a local script, runs only where that is allowed: with allow_custom_code: true in a job, "
            "with --allow-custom-code in a report)"
        )
    if name not in METRICS:
        return _load_from_hub(name)
    line = METRICS[name]
    module = line.module(line.description)
    return Metric(name, line.description, line.scale, line.higher_is_better, line.pooled, module)


def _load_from_hub(name: str) -> Metric:
    """A metric of the hub: its direction is not declared there, so higher is taken as better."""
    try:
        module = HubModule(name)
    except Exception as error:  # its code is somebody's and may raise anything
        raise JobError(
            f"metrics: '{name}' is not built in and `evaluate` cannot load it ({one_line(error)}); "
            f"{_remedy(name)}"
        ) from error
    return Metric(name, f"`{name}` of evaluate", "as the module says", True, True, module)


def _remedy(name: str) -> str:
    near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"built in are {', '.join(METRICS)}"
