"""From logits to distributions, and from distributions to tokens.

One function makes the distribution that is drawn from *and* judged by, for both models. Everything
is float32 from logits (float64 stays float64, for proofs); shapes end in the vocabulary axis V.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipeline.records import Sampling

_BLOCK = 256
"""Tokens that `draw` sums at once."""


def confidence(logits: Tensor) -> Tensor:
    """Untempered probabilities, what deferral rules look at. (..., V) to (..., V)."""
    return torch.softmax(_full_precision(logits), dim=-1)


def sampling_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """What tokens are drawn from: after temperature, top-k, top-p and min-p, in this order.

    The order and the tie rules are those of `transformers`: top-k keeps all tokens that tie with the
    k-th, top-p keeps the token that crosses the mass, and one token always stays. Temperature 0 is
    the one-hot of the first maximum.

    Args:
        logits: (..., V).

    Returns:
        (..., V), sums to one. NaN where the model gave no distribution: a NaN or infinite maximum.
    """
    logits = _full_precision(logits)
    if sampling.temperature == 0:
        highest = logits.amax(dim=-1, keepdim=True)
        first = logits.argmax(dim=-1, keepdim=True)
        greedy = torch.zeros_like(logits).scatter_(-1, first, 1.0)
        return greedy.add_(0 * highest)  # 0 * NaN and 0 * inf are NaN
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probs = torch.softmax(logits, dim=-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        probs = _normalise(probs * _nucleus(probs, sampling.top_p))
    if sampling.min_p is not None:
        probs = _normalise(probs * (probs >= sampling.min_p * probs.amax(-1, keepdim=True)))
    return probs


def is_broken(logits: Tensor) -> Tensor:
    """Whether a model gave no distribution there: a NaN, a +inf, or nothing but -inf. (..., V) to (...)."""
    return ~logits.amax(dim=-1).isfinite()


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling from unnormalised weights. Never returns a token of zero weight.

    Drawing from two distributions with the same uniform makes them agree often, which pairs the
    strategies of an example. Sums are float64, first over blocks of tokens, then inside the one block
    that the uniform falls into, so that the vocabulary is read once.

    Args:
        weights: (N, V), not negative; a row without any mass gives its last token.
        uniform: (N,) in [0, 1), float64.

    Returns:
        int64 (N,).
    """
    width = weights.shape[-1]
    blocks = pad(weights, (0, -width % _BLOCK)).view(len(weights), -1, _BLOCK)
    mass = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    block, before = _find(mass, uniform * mass[:, -1])
    inside = (
        blocks[torch.arange(len(weights), device=weights.device), block].double().cumsum(dim=-1)
    )
    token, _ = _find(inside, uniform * mass[:, -1] - before)
    return (block * _BLOCK + token).clamp(max=width - 1)


def _find(cumulative: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """The first entry whose cumulative weight exceeds the level, and the weight before it. (N,)."""
    total = cumulative[:, -1]
    # Rounding can lift the level to the total, behind which nothing has mass.
    below = torch.minimum(level, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, below[:, None], right=True)
    found = found.clamp(max=cumulative.shape[1] - 1)
    before = cumulative.gather(1, (found - 1).clamp_min(0)) * (found > 0)
    return found[:, 0], before[:, 0]


def total_variation(drafter_probs: Tensor, verifier_probs: Tensor) -> Tensor:
    """D_TV(p, q) = sum max(0, p - q) (Lemma 3), one-sided, over the full vocabulary. (..., V) to (...)."""
    return (verifier_probs - drafter_probs).clamp_min_(0).sum(dim=-1)


def _full_precision(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _normalise(probs: Tensor) -> Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The smallest set of most likely tokens whose mass reaches `top_p`. (..., V) bool."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, mass_before < top_p)
