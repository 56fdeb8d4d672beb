"""Deferral rules: which tokens of the drafter to keep.

Every cascade rule is one pure function that returns a *keep mask* k over the vocabulary; the target
distribution is then (eqs. 6 and 11)

    target = k q + (1 - sum k q) p,      q the drafter's, p the verifier's sampling distribution.

All ones is the drafter, all zeros is the verifier (plain speculative decoding). A rule that looks at
the position alone returns a mask of width 1, a token rule one of width V. Ties keep the drafter; a
larger alpha defers less. Rules read the confidences (untempered probabilities), so that they still
mean something at temperature 0, where the sampling distributions are one-hot.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.protocol.positions import Positions

KeepRule = Callable[[Positions, Tensor], Tensor]
"""(M positions, alpha (M, 1)) to a keep mask, bool (M, 1) or (M, V)."""


def never_defer(at: Positions, alpha: Tensor) -> Tensor:
    """Keep everything: the drafter alone."""
    return torch.ones_like(alpha, dtype=torch.bool)


def always_defer(at: Positions, alpha: Tensor) -> Tensor:
    """Keep nothing: the verifier's distribution, plain speculative decoding (Algorithm 1)."""
    return torch.zeros_like(alpha, dtype=torch.bool)


def chow(at: Positions, alpha: Tensor) -> Tensor:
    """Keep iff max q >= 1 - alpha (eq. 2). Looks at the drafter alone.

    alpha = 0 gives the verifier (a drafter that is certain is kept); alpha = 1 the drafter.
    """
    return at.drafter_max >= 1 - alpha


def diff(at: Positions, alpha: Tensor) -> Tensor:
    """Keep iff max q >= max p - alpha (eq. 5): the more confident model, with a head start.

    alpha = -1 gives the verifier, alpha = 1 the drafter; alpha = 0 picks the more confident model.
    """
    return at.drafter_max >= at.verifier_max - alpha


def opt(at: Positions, alpha: Tensor) -> Tensor:
    """Keep iff max q >= max p - alpha D_TV(p, q) (eq. 10, the plug-in of Lemma 4).

    A large negative alpha gives the verifier wherever the models differ. At temperature 1 alpha >= 1
    gives the drafter, since the gap of the maxima never exceeds the total variation. At temperature
    0 D_TV is 0 or 1, so the tokens are those of `diff`.
    """
    # Written as a difference so that rounding, which is monotone, cannot break the tie at alpha = 1.
    return at.verifier_max - at.drafter_max <= alpha * at.total_variation


def token_v3(at: Positions, alpha: Tensor) -> Tensor:
    """Keep token v iff p(v) >= (1 - alpha) max p (eq. 15).

    alpha = 1 gives the drafter. alpha = 0 keeps only the verifier's most likely tokens: sharper than
    the verifier, so not lossless except at temperature 0; any negative alpha gives the verifier.
    """
    return at.verifier_confidence >= (1 - alpha) * at.verifier_max
