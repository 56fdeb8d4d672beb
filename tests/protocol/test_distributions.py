"""Sampling distributions are those of `transformers`, and drawing is exact inversion.

Planted faults these tests catch: top-k that cuts ties, top-p without the token that crosses the
mass, min-p or top-p before the temperature, a softmax taken in half precision, `u * total` that
rounds up behind the last token with mass, a search on the wrong side of a step, NaN read as 0.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.protocol.distributions import (
    confidence,
    draw,
    is_broken,
    sampling_distribution,
    total_variation,
)
from pipeline.randomness import Role, uniforms
from pipeline.records import Sampling

SETTINGS = [
    Sampling(temperature, top_k, top_p, min_p)
    for temperature in (0.3, 1.0, 1.7)
    for top_k in (None, 1, 4, 1000)
    for top_p in (None, 0.3, 0.9, 1.0)
    for min_p in (None, 0.05, 0.5)
]


def random_logits(rows: int = 200, vocabulary: int = 23, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    logits[: rows // 2] = (2 * logits[: rows // 2]).round() / 2  # many ties
    return logits


def warped(logits: Tensor, sampling: Sampling) -> Tensor:
    """What `generate` of transformers draws from."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return torch.softmax(warpers(torch.zeros(len(logits), 1, dtype=torch.long), logits), dim=-1)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_sampling_distribution_is_that_of_transformers(sampling: Sampling) -> None:
    # Without ties at the border of the nucleus, where the two libraries may choose other tokens.
    logits = random_logits().double()[100:]
    probs = sampling_distribution(logits, sampling)
    expected = warped(logits, sampling)
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("top_k", [1, 3, 10])
def test_top_k_keeps_all_tokens_that_tie_with_the_last_one_kept(top_k: int) -> None:
    logits = random_logits()
    probs = sampling_distribution(logits, Sampling(1.0, top_k=top_k))
    torch.testing.assert_close(probs, warped(logits, Sampling(1.0, top_k=top_k)))
    assert ((probs > 0).sum(dim=-1) > top_k).any(), "no ties among the examples"


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in ((0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4)):
        probs = sampling_distribution(logits, Sampling(1.0, top_p=top_p))
        assert (probs > 0).sum() == kept, top_p


@pytest.mark.parametrize("sampling", [Sampling(0.0), *SETTINGS[::5]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_probabilities_sum_to_one_whatever_the_dtype(
    dtype: torch.dtype, sampling: Sampling
) -> None:
    probs = sampling_distribution(random_logits(vocabulary=300).to(dtype), sampling)
    assert probs.dtype == torch.float32
    assert (probs.double().sum(dim=-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.0, top_k=3, top_p=0.5)])
def test_temperature_zero_is_one_hot_at_the_first_maximum(sampling: Sampling) -> None:
    logits = random_logits()
    logits[3] = 0.0
    probs = sampling_distribution(logits, sampling)
    assert torch.equal(probs.sum(dim=-1), torch.ones(len(logits)))
    for row, weights in zip(logits.tolist(), probs.tolist(), strict=True):
        assert weights.index(1.0) == row.index(max(row))


def test_confidence_ignores_the_sampling_and_is_the_plain_softmax() -> None:
    logits = random_logits()
    exps = logits.double().exp()
    expected = exps / exps.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(confidence(logits).double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0), Sampling(0.5, 4, 0.9, 0.1)])
def test_a_bad_logit_breaks_its_own_row_and_no_other(sampling: Sampling, bad: float) -> None:
    clean = random_logits(4)
    logits = clean.clone()
    logits[1, 5] = bad
    probs = sampling_distribution(logits, sampling)
    assert probs[1].isnan().any()
    assert torch.equal(probs[[0, 2, 3]], sampling_distribution(clean, sampling)[[0, 2, 3]])
    assert is_broken(confidence(logits)).tolist() == [False, True, False, False]


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0), Sampling(0.5, 4, 0.9, 0.1)])
def test_a_row_without_any_finite_logit_is_broken_but_masked_tokens_are_not(
    sampling: Sampling,
) -> None:
    logits = torch.full((2, 5), -torch.inf)
    logits[1, 2:] = 0.0
    assert is_broken(confidence(logits)).tolist() == [True, False]
    probs = sampling_distribution(logits, sampling)
    assert probs[0].isnan().any()
    assert probs[1, :2].tolist() == [0.0, 0.0]


def exact_draw(weights: list[float], uniform: float) -> int:
    """The first token whose cumulative weight exceeds u times the total, in rational numbers."""
    level = Fraction(uniform) * sum(map(Fraction, weights))
    below = Fraction(0)
    for token, weight in enumerate(weights):
        below += Fraction(weight)
        if level < below:
            return token
    raise AssertionError("u < 1")


def test_draw_is_the_exact_inverse_of_the_cumulative_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(500, 7, generator=generator) * (
        torch.rand(500, 7, generator=generator) < 0.6
    )
    weights[:, 3] += 0.1
    uniform = torch.rand(500, generator=generator, dtype=torch.float64)
    expected = [
        exact_draw(row, u) for row, u in zip(weights.tolist(), uniform.tolist(), strict=True)
    ]
    assert draw(weights, uniform).tolist() == expected


def test_draw_on_a_step_takes_the_token_above_it() -> None:
    weights = torch.tensor([0.25, 0.0, 0.25, 0.5]).expand(5, 4)
    uniform = torch.tensor([0.0, 0.25, 0.4999, 0.5, 0.75], dtype=torch.float64)
    assert draw(weights, uniform).tolist() == [0, 2, 2, 3, 3]


def test_draw_never_returns_a_token_of_zero_weight() -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(4000, 9, generator=generator) ** 8
    weights *= torch.rand(4000, 9, generator=generator) < 0.5
    weights[:, 4] += 1e-30
    extremes = [0.0, 2.0**-53, 0.5, 1 - 2.0**-53]
    for value in extremes:
        tokens = draw(weights, torch.full((4000,), value, dtype=torch.float64))
        assert (weights.gather(1, tokens[:, None]) > 0).all(), value


def test_draw_close_to_one_stays_on_the_last_token_with_mass() -> None:
    # 0.1 is 0.1 + 1.5e-9 in float32: such totals times (1 - 2**-53) round up to the total itself.
    totals = torch.linspace(0.01, 3, 5000)
    weights = torch.stack([totals / 3, totals, torch.zeros(5000), torch.zeros(5000)], dim=1)
    uniform = torch.full((5000,), 1 - 2.0**-53, dtype=torch.float64)
    assert (draw(weights, uniform) == 1).all()


def test_draw_takes_unnormalised_weights() -> None:
    weights = torch.tensor([[1.0, 3.0], [0.25, 0.75], [1e-30, 3e-30]])
    for value in (0.2, 0.3, 0.9):
        tokens = draw(weights, torch.full((3,), value, dtype=torch.float64))
        assert len(set(tokens.tolist())) == 1, value


def test_draw_has_the_law_of_its_weights() -> None:
    """Chi-square with a false-alarm rate of 1e-6; the draws are fixed."""
    probs = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.07, 0.03])
    u = uniforms(0, torch.arange(1), torch.zeros(1).long(), torch.arange(20000)[None], Role.DRAFT)
    counts = torch.bincount(draw(probs.expand(20000, 6), u[0]), minlength=6).double()
    kept = probs > 0
    expected = 20000 * probs[kept].double()
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    assert counts[1] == 0
    assert torch.special.gammaincc(torch.tensor(2.0), statistic / 2) > 1e-6  # 4 degrees of freedom


def test_total_variation_is_half_the_absolute_difference() -> None:
    first, second = confidence(random_logits(seed=1)), confidence(random_logits(seed=2))
    expected = (first - second).abs().sum(dim=-1) / 2
    torch.testing.assert_close(total_variation(first, second), expected)
    assert total_variation(first, first).abs().max() == 0
