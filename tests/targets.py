"""Custom targets, as a user would write them."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor


def mixture(drafter_probs: Tensor, verifier_probs: Tensor, alpha: Tensor) -> Tensor:
    """A bit of both models."""
    return alpha * drafter_probs + (1 - alpha) * verifier_probs


def not_a_distribution(drafter_probs: Tensor, verifier_probs: Tensor, alpha: Tensor) -> Tensor:
    """A mistake: it sums to two."""
    return drafter_probs + verifier_probs


def raises_when_told(drafter_probs: Tensor, verifier_probs: Tensor, alpha: Tensor) -> Tensor:
    """A mixture; but it raises, once, when there is a file of the name in CHAOS_FILE."""
    told = Path(os.environ.get("CHAOS_FILE", "/nowhere/at/all"))
    if told.exists():
        told.unlink(missing_ok=True)
        raise RuntimeError("told to raise")
    return mixture(drafter_probs, verifier_probs, alpha)
