"""Drawing block by block is the plain inversion of all cumulative weights.

Weights are integers and totals powers of two, so every sum and every product with a uniform is exact
in float64, and the uniforms can be put on the very steps of the cumulative distribution.

Planted faults these tests catch: blocks searched on the wrong side of a step; the weight before a
block left in the level, or that of another block; a last block that is cut; sums of a block, or inside
it, in float32; a level that rounds up behind the last token with mass.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.protocol.distributions import draw

VOCABULARIES = (1, 2, 100, 255, 256, 257, 300, 511, 512, 513, 1000, 1024, 5001)
TOTAL, HUGE = 2.0**33, 2.0**24 - 1

every_vocabulary = pytest.mark.parametrize("vocabulary", VOCABULARIES)


def weights_with_zeros(rows: int, vocabulary: int, seed: int) -> Tensor:
    """Integers that sum to `TOTAL`, float32 (rows, V); many are 0, at borders of blocks above all.

    Some are so large that sums in float32 would lose the others.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, vocabulary)
    weights = torch.randint(0, 300, shape, generator=generator).double()
    weights[torch.rand(shape, generator=generator) < 0.01] = HUGE
    weights *= torch.rand(shape, generator=generator) < 0.6
    weights[::2, 255::256] = weights[1::2, 0::256] = 0
    weights[::3, 256:512] = 0  # a whole block
    weights[::5, -300:] = 0
    weights[1::5, :300] = 0
    row, place = torch.arange(rows), torch.randint(0, vocabulary, (rows,), generator=generator)
    other = (place + 1) % vocabulary
    weights[row, place] = weights[row, other] = 0
    rest = TOTAL - weights.sum(dim=1)
    weights[row, other] = rest % 4096  # what float32 would round off
    weights[row, place] += rest - rest % 4096
    assert torch.equal(weights.float().double().sum(dim=1), torch.full((rows,), TOTAL).double())
    return weights.float()


def inverted(weights: Tensor, uniform: Tensor) -> list[int]:
    """The first token whose cumulative weight exceeds u times the total."""
    cumulative = np.cumsum(weights.double().numpy(), axis=1)
    levels = uniform.numpy() * cumulative[:, -1]
    return [
        int(np.searchsorted(row, level, "right"))
        for row, level in zip(cumulative, levels, strict=True)
    ]


@every_vocabulary
def test_draws_are_the_inverse_of_the_cumulative_weights(vocabulary: int) -> None:
    weights = weights_with_zeros(400, vocabulary, seed=vocabulary)
    generator = torch.Generator().manual_seed(1)
    uniform = torch.randint(0, 2**30, (400,), generator=generator).double() / 2**30
    tokens = draw(weights, uniform)
    assert tokens.tolist() == inverted(weights, uniform)
    assert (weights.gather(1, tokens[:, None]) > 0).all()


@every_vocabulary
def test_a_uniform_on_a_step_takes_the_next_token_that_has_weight(vocabulary: int) -> None:
    """Also where the step is the border of a block, or whole blocks behind it are empty."""
    for seed in range(6 if vocabulary < 2000 else 1):
        one = weights_with_zeros(10, vocabulary, seed)[seed][None]
        steps = torch.cat([torch.zeros(1).double(), one[0].double().cumsum(0)]).unique()
        levels = torch.cat([steps[steps < TOTAL], steps[1:] - 2**-20])
        tokens = draw(one.expand(len(levels), -1), levels / TOTAL)
        assert tokens.tolist() == inverted(one.expand(len(levels), -1), levels / TOTAL)
        assert (one[0, tokens] > 0).all()


@every_vocabulary
def test_one_token_with_weight_is_always_drawn(vocabulary: int) -> None:
    borders = {0, 1, 254, 255, 256, 257, 511, 512, vocabulary - 2, vocabulary - 1}
    places = sorted(place for place in borders if 0 <= place < vocabulary)
    weights = torch.zeros(len(places), vocabulary)
    for value in (1.0, 1e-30, 0.1, 3e7):
        weights[torch.arange(len(places)), places] = value
        for uniform in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53):
            uniforms = torch.full((len(places),), uniform, dtype=torch.float64)
            assert draw(weights, uniforms).tolist() == places, (value, uniform)


@every_vocabulary
@pytest.mark.parametrize("uniform", [0.0, 0.3, 1 - 2.0**-53])
def test_rounded_sums_never_lead_to_a_token_without_weight(vocabulary: int, uniform: float) -> None:
    """Weights of any size: sums of a block and inside it are rounded in another order."""
    generator = torch.Generator().manual_seed(vocabulary)
    shape = (1000, vocabulary)
    weights = torch.rand(shape, generator=generator) ** 30
    weights *= torch.rand(shape, generator=generator) < 0.5
    weights[:, -1:] = 0
    weights[:, :1] += 1e-30
    tokens = draw(weights, torch.full((1000,), uniform, dtype=torch.float64))
    assert (weights.gather(1, tokens[:, None]) > 0).all() or vocabulary == 1


@pytest.mark.parametrize("vocabulary", [7, 256, 700])
def test_a_distributions_draws_equal_those_over_all_of_it(vocabulary: int) -> None:
    logits = 3 * torch.randn(20_000, vocabulary, generator=torch.Generator().manual_seed(2))
    probs = torch.softmax(logits, dim=-1)
    generator = torch.Generator().manual_seed(3)
    uniform = torch.rand(20_000, generator=generator, dtype=torch.float64)
    assert draw(probs, uniform).tolist() == inverted(probs, uniform)


@pytest.mark.parametrize("vocabulary", [5, 256, 300])
def test_a_row_without_weight_gives_its_last_token(vocabulary: int) -> None:
    uniform = torch.tensor([0.0, 0.4, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(torch.zeros(3, vocabulary), uniform).tolist() == [vocabulary - 1] * 3
