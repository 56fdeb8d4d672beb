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


def entropy(at: Positions, alpha: Tensor) -> Tensor:
    """Keep iff H(q) <= alpha, in nats: Chow's rule for the log loss (appendix B). alpha >= 0.

    alpha = 0 gives the verifier (a drafter that is certain is kept); alpha = log V the drafter.
    """
    return at.drafter_entropy <= alpha


def diff_log(at: Positions, alpha: Tensor) -> Tensor:
    """Keep iff H(q) <= H(p) + alpha, in nats: `diff` for the log loss (appendix B).

    alpha = -log V gives the verifier (save where it is uniform and the drafter certain), alpha =
    log V the drafter.
    """
    return at.drafter_entropy <= at.verifier_entropy + alpha


def opt_log(at: Positions, alpha: Tensor) -> Tensor:
    """Keep iff H(q) <= H(p) + alpha D_TV(p, q): `opt` for the log loss (Lemma 4 with entropies).

    Large negative alpha gives the verifier wherever the models differ, large positive the drafter.
    """
    return at.drafter_entropy - at.verifier_entropy <= alpha * at.total_variation


def bild_star(at: Positions, alpha: Tensor) -> Tensor:
    """Keep iff -log p(argmax q) <= alpha, in nats: BiLD's discrepancy in Algorithm 5 (section 5).

    alpha = 0 gives the verifier wherever it is not certain of the drafter's first choice; a large
    alpha gives the drafter.
    """
    return at.verifier_loss_of_drafter_mode <= alpha


def token_v1(at: Positions, alpha: Tensor) -> Tensor:
    """Keep token v iff q(v) >= max p - alpha (eq. 13). alpha = -1 gives the verifier, 1 the drafter."""
    return at.drafter_confidence >= at.verifier_max - alpha


def token_v2(at: Positions, alpha: Tensor) -> Tensor:
    """Keep token v iff p(v) >= max p - alpha (eq. 14). alpha = -1 gives the verifier, 1 the drafter.

    alpha = 0 keeps only the verifier's most likely tokens: sharper than the verifier.
    """
    return at.verifier_confidence >= at.verifier_max - alpha


def token_v3(at: Positions, alpha: Tensor) -> Tensor:
    """Keep token v iff p(v) >= (1 - alpha) max p (eq. 15).

    alpha = 1 gives the drafter. alpha = 0 keeps only the verifier's most likely tokens: sharper than
    the verifier, so not lossless except at temperature 0; any negative alpha gives the verifier.
    """
    return at.verifier_confidence >= (1 - alpha) * at.verifier_max
