"""The example of a custom target keeps the contract that it documents."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jobs.custom_target import geometric_mean
from pipeline.protocol.strategies import sweep, target_of
from pipeline.protocol.targets import Custom, is_distribution


def pair(rows: int = 50, vocabulary: int = 7) -> tuple[Tensor, Tensor]:
    drafter, verifier = 3 * torch.randn(
        2, rows, vocabulary, generator=torch.Generator().manual_seed(3)
    )
    return drafter.softmax(dim=-1), verifier.softmax(dim=-1)


def filled(alpha: float, rows: int = 50) -> Tensor:
    return torch.full((rows, 1), alpha)


def test_it_is_the_normalised_product() -> None:
    drafter, verifier = pair()
    product = drafter**0.3 * verifier**0.7
    expected = product / product.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(geometric_mean(drafter, verifier, filled(0.3)), expected)
    even = geometric_mean(drafter, verifier, filled(float("nan")))
    torch.testing.assert_close(even, geometric_mean(drafter, verifier, filled(0.5)))


def test_its_ends_are_the_models_also_where_a_probability_is_zero() -> None:
    drafter, verifier = pair()
    drafter[:, 0], verifier[:, 1] = 0, 0
    drafter, verifier = (probs / probs.sum(dim=-1, keepdim=True) for probs in (drafter, verifier))
    torch.testing.assert_close(geometric_mean(drafter, verifier, filled(0.0)), verifier)
    torch.testing.assert_close(geometric_mean(drafter, verifier, filled(1.0)), drafter)


def test_one_hot_models_that_disagree_give_the_verifiers_token() -> None:
    one_hot = torch.eye(4)
    target = geometric_mean(one_hot, one_hot.roll(1, dims=0), filled(0.5, 4))
    assert torch.equal(target, one_hot.roll(1, dims=0))
    assert torch.equal(geometric_mean(one_hot, one_hot, filled(0.5, 4)), one_hot)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.9, float("nan")])
def test_rows_are_distributions_and_do_not_see_each_other(alpha: float) -> None:
    drafter, verifier = pair()
    before = drafter.clone(), verifier.clone()
    target = geometric_mean(drafter, verifier, filled(alpha))
    assert bool(is_distribution(target).all())
    alone = [
        geometric_mean(drafter[i : i + 1], verifier[i : i + 1], filled(alpha, 1)) for i in range(50)
    ]
    assert torch.equal(torch.cat(alone), target)
    assert torch.equal(before[0], drafter)
    assert torch.equal(before[1], verifier)


def test_a_job_finds_it_by_name() -> None:
    given = {"target": "jobs.custom_target:geometric_mean", "alpha": [0.2, 0.5]}
    strategies = sweep("custom", given)
    assert [strategy.alpha for strategy in strategies] == [0.2, 0.5]
    target = target_of(strategies[0])
    assert isinstance(target, Custom)
    assert target.function is geometric_mean
