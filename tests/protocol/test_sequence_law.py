"""Whole texts have the law that follows from the target at each position.

20 000 texts of at most three tokens are decoded with a fixed seed, and their frequencies compared
with exactly enumerated probabilities by a chi-square test. For a correct engine a fresh seed would
fail one of these tests with probability 1e-6 each; the seed is fixed, so they never flicker.

Planted faults these tests catch: one uniform used for two roles (draft and acceptance, acceptance
and residual) or at two positions, a block's second token judged by the first one's distributions,
the bonus token of a cascade drawn from the verifier where the target was asked for.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pipeline.models.toy import TableModel
from pipeline.records import Sampling, Setting, Strategy
from tests import reference
from tests.loop import decode

VOCABULARY, BLOCK_SIZE, LENGTH, EOS = 3, 2, 3, 0
EXAMPLES, REPEATS = 50, 400
FALSE_ALARMS = 1e-6

STRATEGIES = [
    Strategy("verifier"),
    Strategy("token_cascade.chow", 0.5),
    Strategy("spec_decode"),
    Strategy("lossy_spec_decode", 0.4, beta=1.0),
    Strategy("spec_cascade.chow", 0.5),
    Strategy("spec_cascade.opt", 0.3),
    Strategy("spec_cascade.token_v3", 0.3),
    Strategy("custom", 0.5, target="tests.targets:mixture"),
]

DRAFTER = torch.tensor([[0.0, 0.0, 0.0], [-0.5, 0.2, 1.0], [-0.7, 0.9, 0.2]])
VERIFIER = torch.tensor([[0.0, 0.0, 0.0], [-0.6, 1.4, 0.3], [-0.8, -0.2, 0.1]])

Text = tuple[int, ...]


def law(strategy: Strategy, sampling: Sampling) -> dict[Text, float]:
    """The probability of every text behind token 1, from the target of each row of the tables."""
    rows = [
        reference.target(strategy, reference.At.of(q, p, Setting(1, 1, sampling)))
        for q, p in zip(DRAFTER.double().numpy(), VERIFIER.double().numpy(), strict=True)
    ]
    probabilities: dict[Text, float] = {}

    def extend(text: Text, probability: float) -> None:
        if len(text) == LENGTH or (text and text[-1] == EOS):
            probabilities[text] = probability
            return
        last = text[-1] if text else 1
        for token in range(VOCABULARY):
            extend((*text, token), probability * rows[last][token])

    extend((), 1.0)
    return probabilities


@pytest.fixture(scope="module")
def texts() -> dict[str, Counter[Text]]:
    setting = Setting(
        BLOCK_SIZE,
        LENGTH,
        Sampling(0.8),
        bonus="target",
        seed=11,
        repeats=REPEATS,
        eos_token_ids=(EOS,),
    )
    outcomes = decode(
        TableModel(DRAFTER), TableModel(VERIFIER), [[1]] * EXAMPLES, STRATEGIES, setting, slots=4000
    )
    counted: dict[str, Counter[Text]] = {strategy.label: Counter() for strategy in STRATEGIES}
    for (_, _, label), outcome in outcomes.items():
        counted[label][outcome.output_ids] += 1
    return counted


def chi_square_p_value(counts: Counter[Text], probabilities: dict[Text, float]) -> float:
    total = sum(counts.values())
    statistic = sum(
        (counts[text] - total * probability) ** 2 / (total * probability)
        for text, probability in probabilities.items()
        if probability > 0
    )
    freedom = sum(probability > 0 for probability in probabilities.values()) - 1
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.label)
def test_texts_have_the_enumerated_law(texts: dict[str, Counter[Text]], strategy: Strategy) -> None:
    counts, probabilities = texts[strategy.label], law(strategy, Sampling(0.8))
    assert sum(counts.values()) == EXAMPLES * REPEATS
    assert sum(probabilities.values()) == pytest.approx(1)
    assert set(counts) <= {text for text, probability in probabilities.items() if probability > 0}
    assert chi_square_p_value(counts, probabilities) > FALSE_ALARMS


def test_the_laws_differ_enough_to_be_told_apart(texts: dict[str, Counter[Text]]) -> None:
    """The same counts fail against the law of any other strategy but a truly equal one."""
    laws = {strategy.label: law(strategy, Sampling(0.8)) for strategy in STRATEGIES}
    for label, counts in texts.items():
        for other, probabilities in laws.items():
            far = sum(abs(probabilities[text] - laws[label][text]) for text in probabilities) > 1e-9
            assert (chi_square_p_value(counts, probabilities) < FALSE_ALARMS) == far, (label, other)
