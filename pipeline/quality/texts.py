"""Scores of one prediction against one reference, from the texts alone."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(prediction: str, reference: str) -> float:
    """1 if the texts are equal but for white space at their ends, else 0."""
    return float(prediction.strip() == reference.strip())


def token_f1(prediction: str, reference: str) -> float:
    """F1 of the words that both have, as SQuAD does it: lower case, no punctuation, no articles."""
    predicted, expected = _squad_words(prediction), _squad_words(reference)
    if not predicted or not expected:
        return float(predicted == expected)
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected))


def edit_error_rate(prediction: str, reference: str) -> float:
    """Insertions, deletions and substitutions of words (split at white space) a reference word."""
    return _error_rate(prediction.split(), reference.split())


def char_error_rate(prediction: str, reference: str) -> float:
    """Insertions, deletions and substitutions of characters a reference character."""
    return _error_rate(prediction.strip(), reference.strip())


def edit_distance(left: Sequence[str], right: Sequence[str]) -> int:
    """Levenshtein distance: the fewest insertions, deletions and substitutions."""
    numbers = {item: number for number, item in enumerate({*left, *right})}
    columns = np.array([numbers[item] for item in right], dtype=np.int64)
    offsets = np.arange(len(right) + 1)
    row = offsets.copy()
    for item in left:
        above = row + 1
        above[1:] = np.minimum(above[1:], row[:-1] + (columns != numbers[item]))
        # An insertion costs one a step to the right: a running minimum once the steps are taken off.
        row = np.minimum.accumulate(above - offsets) + offsets
    return int(row[-1])


def _error_rate(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Against an empty reference each superfluous item counts as one."""
    return edit_distance(predicted, expected) / max(1, len(expected))


def _squad_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
