"""The metrics as `evaluate` modules: built here, so that nothing is fetched and no file is locked.

Each module computes either one value for every row (`per_row=True`) or one for the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import datasets
import evaluate
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF

References = Sequence[Sequence[str]]
TextScore = Callable[[str, str], float]


class TextModule(evaluate.Metric):  # type: ignore[misc]
    """Base of the built-in metrics: predictions are texts, references lists of one text or more."""

    def __init__(self, description: str) -> None:
        self._description = description
        # In memory: the default writes to a cache that all processes of a home folder share.
        super().__init__(keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=self._description,
            citation="",
            inputs_description="predictions: texts; references: a list of texts for each.",
            features=datasets.Features({"predictions": text, "references": datasets.List(text)}),
        )

    def _compute(
        self, *, predictions: Sequence[str], references: References, per_row: bool
    ) -> dict[str, Any]:
        if per_row:
            pairs = zip(predictions, references, strict=True)
            return {"values": [self.row_value(text, texts) for text, texts in pairs]}
        return {"corpus": self.corpus_value(predictions, references)}

    def row_value(self, prediction: str, references: Sequence[str]) -> float:
        """The value of one row."""
        raise NotImplementedError

    def corpus_value(self, predictions: Sequence[str], references: References) -> float:
        """The mean of the rows' values, unless a metric pools its statistics."""
        pairs = zip(predictions, references, strict=True)
        return sum(self.row_value(text, texts) for text, texts in pairs) / len(predictions)


class BestReference(TextModule):
    """A score of two texts; with several references the best one counts."""

    def __init__(self, description: str, score: TextScore, best: Callable[..., float]) -> None:
        super().__init__(description)
        self._score, self._best = score, best

    def row_value(self, prediction: str, references: Sequence[str]) -> float:
        """The best score over the references."""
        return self._best(self._score(prediction, reference) for reference in references)


class Rouge(TextModule):
    """F-measure of `rouge_score`, without stemming; the best reference counts."""

    def __init__(self, description: str, kind: str) -> None:
        super().__init__(description)
        self._kind, self._scorer = kind, RougeScorer([kind])

    def row_value(self, prediction: str, references: Sequence[str]) -> float:
        """The F-measure against the best reference."""
        return float(self._scorer.score_multi(list(references), prediction)[self._kind].fmeasure)


class SacreBleu(TextModule):
    """A sacrebleu metric: its sentence score for a row, its pooled statistics for the corpus."""

    def __init__(self, description: str, sentence: BLEU | CHRF, corpus: BLEU | CHRF) -> None:
        super().__init__(description)
        self._sentence, self._corpus = sentence, corpus

    def row_value(self, prediction: str, references: Sequence[str]) -> float:
        """The sentence score, all references together."""
        return float(self._sentence.sentence_score(prediction, list(references)).score)

    def corpus_value(self, predictions: Sequence[str], references: References) -> float:
        """The score of all rows together, each with as many references as it has."""
        streams = [list(stream) for stream in zip_longest(*references)]
        return float(self._corpus.corpus_score(list(predictions), streams).score)


class HubModule:
    """A metric that the hub, or a local folder with a metric script, serves to `evaluate.load`."""

    def __init__(self, name: str) -> None:
        self._module = evaluate.load(name, keep_in_memory=True)
        options = self._module.features
        self._options = options if isinstance(options, list) else [options]

    def compute(
        self, *, predictions: Sequence[str], references: References, per_row: bool
    ) -> dict[str, Any]:
        """Values of the rows, each scored alone, or the value of the corpus."""
        if not per_row:
            return {"corpus": self._value(predictions, references)}
        pairs = zip(predictions, references, strict=True)
        return {"values": [self._value([text], [texts]) for text, texts in pairs]}

    def _value(self, predictions: Sequence[str], references: References) -> float:
        """The result under the module's own name, else its first number."""
        given = references if self._takes_lists() else [texts[0] for texts in references]
        results = self._module.compute(predictions=list(predictions), references=list(given))
        numbers = {key: value for key, value in results.items() if isinstance(value, float | int)}
        return float(numbers.get(self._module.name, next(iter(numbers.values()))))

    def _takes_lists(self) -> bool:
        """Whether it takes several references a row; if not, it is given the first."""
        return any(not isinstance(one["references"], datasets.Value) for one in self._options)
