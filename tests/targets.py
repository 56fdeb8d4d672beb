"""Custom targets, as a user would write them."""

from __future__ import annotations

from torch import Tensor


def mixture(drafter_probs: Tensor, verifier_probs: Tensor, alpha: Tensor) -> Tensor:
    """A bit of both models."""
    return alpha * drafter_probs + (1 - alpha) * verifier_probs


def not_a_distribution(drafter_probs: Tensor, verifier_probs: Tensor, alpha: Tensor) -> Tensor:
    """A mistake: it sums to two."""
    return drafter_probs + verifier_probs
