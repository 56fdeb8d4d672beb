"""The built-in metrics against values worked out by hand and against the libraries."""

from __future__ import annotations

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

from pipeline.config import JobError
from pipeline.quality.metrics import METRICS, corpus_value, load_metrics, score
from pipeline.quality.texts import edit_distance

PREDICTIONS = ["the cat sat on the mat", "a dog", "nothing in common here at all"]
REFERENCES = [
    ["the cat sat on a mat", "a cat was on the mat"],
    ["the dog"],
    ["completely different words stand there"],
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("the network is blocked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


def rows(name: str, predictions: list[str | None], references: list[list[str]]) -> list[Any]:
    return score(load_metrics([name], True), predictions, references)[name]


def corpus(name: str, predictions: list[str | None], references: list[list[str]]) -> float | None:
    return corpus_value(load_metrics([name], True)[0], predictions, references)


def test_all_built_in_metrics_compute_without_a_network() -> None:
    metrics = load_metrics(METRICS)
    columns = score(metrics, PREDICTIONS, REFERENCES)
    assert list(columns) == list(METRICS)
    for metric in metrics:
        assert all(isinstance(value, float) for value in columns[metric.name])
        value = corpus_value(metric, PREDICTIONS, REFERENCES)
        assert value is not None
        top = 100 if metric.scale == "0 to 100" else 1
        assert 0 <= value <= top or metric.scale == "0 or more"


@pytest.mark.parametrize(
    ("name", "prediction", "references", "expected"),
    [
        ("exact_match", " yes ", ["no", "yes"], 1.0),
        ("exact_match", "Yes", ["yes"], 0.0),
        ("token_f1", "The cat!", ["a cat sat"], 2 / 3),
        ("token_f1", "cat cat", ["cat"], 2 / 3),
        ("token_f1", "the", ["a"], 1.0),
        ("token_f1", "", ["word"], 0.0),
        ("edit_error_rate", "a x c", ["a b c d"], 0.5),
        ("edit_error_rate", "a x c", ["a b c d", "a x"], 0.5),
        ("edit_error_rate", "a b c d e f", ["a"], 5.0),
        ("edit_error_rate", "", ["a b"], 1.0),
        ("edit_error_rate", "a b", [""], 2.0),
        ("edit_error_rate", "", [""], 0.0),
        ("char_error_rate", "kitten", ["sitting"], 3 / 7),
    ],
)
def test_values_by_hand(name: str, prediction: str, references: list[str], expected: float) -> None:
    assert rows(name, [prediction], [references]) == [pytest.approx(expected)]


def test_edit_distance_equals_the_textbook_recursion() -> None:
    def textbook(left: str, right: str) -> int:
        if not left or not right:
            return len(left) + len(right)
        change = textbook(left[1:], right[1:]) + (left[0] != right[0])
        return min(change, textbook(left[1:], right) + 1, textbook(left, right[1:]) + 1)

    rng = random.Random(0)
    for _ in range(60):
        left, right = ("".join(rng.choices("abc", k=rng.randrange(6))) for _ in range(2))
        assert edit_distance(left, right) == textbook(left, right)


def test_bleu_and_chrf_equal_sacrebleu() -> None:
    for prediction, references in zip(PREDICTIONS, REFERENCES, strict=True):
        bleu = sacrebleu.sentence_bleu(prediction, references).score
        chrf = sacrebleu.sentence_chrf(prediction, references).score
        assert rows("bleu", [prediction], [references]) == [bleu]
        assert rows("chrf", [prediction], [references]) == [chrf]
    first = [references[0] for references in REFERENCES]
    second = [references[1] if len(references) > 1 else None for references in REFERENCES]
    for name, compute in (("bleu", sacrebleu.corpus_bleu), ("chrf", sacrebleu.corpus_chrf)):
        assert corpus(name, PREDICTIONS, REFERENCES) == compute(PREDICTIONS, [first, second]).score


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_pooled_corpus_values_are_not_the_mean_of_the_rows(name: str) -> None:
    """The planted fault: averaging sentence scores."""
    wrong = mean(rows(name, PREDICTIONS, REFERENCES))
    assert abs(corpus(name, PREDICTIONS, REFERENCES) - wrong) > 1


@pytest.mark.parametrize("name", sorted(METRICS.keys() - {"bleu", "chrf"}))
def test_other_corpus_values_are_the_mean_of_the_rows(name: str) -> None:
    expected = mean(rows(name, PREDICTIONS, REFERENCES))
    assert corpus(name, PREDICTIONS, REFERENCES) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["rouge1", "rouge2", "rougeL"])
def test_rouge_equals_rouge_score_with_the_best_reference(name: str) -> None:
    scorer = RougeScorer([name])
    best = max(scorer.score(text, PREDICTIONS[0])[name].fmeasure for text in REFERENCES[0])
    assert rows(name, PREDICTIONS[:1], REFERENCES[:1]) == [best]


@pytest.mark.parametrize("name", METRICS)
def test_rows_without_prediction_or_reference_are_null_and_not_counted(name: str) -> None:
    predictions = [None, *PREDICTIONS, "text"]
    references = [["x"], *REFERENCES, []]
    values = rows(name, predictions, references)
    assert values == [None, *rows(name, PREDICTIONS, REFERENCES), None]
    assert corpus(name, predictions, references) == corpus(name, PREDICTIONS, REFERENCES)
    assert rows(name, [None], [["x"]]) == [None]
    assert corpus(name, [None], [["x"]]) is None


def test_only_error_rates_are_better_low() -> None:
    low = {metric.name for metric in load_metrics(METRICS) if not metric.higher_is_better}
    assert low == {"edit_error_rate", "char_error_rate"}


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    for allowed in (False, True):
        with pytest.raises(JobError, match=r"metrics: 'blue' is not built in.*did you mean 'bleu'"):
            load_metrics(["exact_match", "blue"], allowed)


METRIC_SCRIPT = """
import datasets
import evaluate

class WordCount(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions, references):
        return {"first": -1.0, "word_count": sum(len(p.split()) for p in predictions)}
"""


def test_a_metric_of_evaluates_own_loader(tmp_path: Path) -> None:
    folder = tmp_path / "word_count"
    folder.mkdir()
    (folder / "word_count.py").write_text(METRIC_SCRIPT)
    name = str(folder)
    assert rows(name, ["a b", None, "c"], [["x", "y"], ["y"], ["z"]]) == [2.0, None, 1.0]
    assert corpus(name, ["a b", None, "c"], [["x", "y"], ["y"], ["z"]]) == 3.0


def test_two_jobs_at_once_do_not_disturb_each_other() -> None:
    expected = rows("bleu", PREDICTIONS, REFERENCES)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(rows, "bleu", PREDICTIONS, REFERENCES) for _ in range(4)]
        assert [job.result() for job in jobs] == [expected] * 4
