"""Target distributions: what a speculative strategy must sample from, given both models.

A target says three things about a position: whether the drafted token is a deferral, how much
target mass it has (the acceptance test is `u q(x) < mass`), and the residual to draw from after a
rejection. The dense distribution is there for proofs; decoding never builds it where it need not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.protocol.positions import Positions
from pipeline.protocol.rules import KeepRule

_SUM_TOLERANCE = 1e-3
_BISECTIONS = 60


@dataclass(frozen=True)
class Parameters:
    """The parameters of M judged tokens as columns (M, 1); NaN where a strategy has none."""

    alpha: Tensor
    """A rule's threshold."""
    beta: Tensor
    """Of lossy speculative decoding; NaN means tuned."""

    def take(self, index: Tensor) -> Parameters:
        """The rows `index`."""
        return Parameters(self.alpha[index], self.beta[index])

    def repeated(self, times: int) -> Parameters:
        """Each row `times` times in a row."""
        alpha = self.alpha.repeat_interleave(times, dim=0)
        return Parameters(alpha, self.beta.repeat_interleave(times, dim=0))


@dataclass(frozen=True)
class Judgement:
    """What a target says of M drafted tokens, (M, 1) each.

    `rejection` is the probability that a draft is rejected at the position, over all drafts.
    """

    deferred: Tensor
    mass: Tensor
    rejection: Tensor


class Target(ABC):
    """T(q, p) of the paper's Algorithm 4."""

    is_narrow = True
    """Whether judging needs no work over the vocabulary; the residual is then `residual_of_verifier`."""
    defers = True
    """Whether there is a choice between the models at all."""

    @abstractmethod
    def judge(self, at: Positions, given: Parameters) -> Judgement:
        """Judge the drafted tokens."""

    @abstractmethod
    def residual(self, at: Positions, given: Parameters) -> Tensor:
        """Unnormalised weights max(0, target - q), (M, V); the target where all are zero."""

    @abstractmethod
    def probabilities(self, at: Positions, given: Parameters) -> Tensor:
        """The dense target distribution, (M, V)."""


@dataclass(frozen=True)
class Kept(Target):
    """The target of a keep mask of width 1: q where it keeps, p where it defers (eq. 6)."""

    keep: KeepRule

    def judge(self, at: Positions, given: Parameters) -> Judgement:
        """Where the rule keeps, the mass is q(x), so the token is accepted; rejection is r D_TV."""
        keep = self.keep(at, given.alpha)
        mass = torch.where(keep, at.drafter_prob_of_draft, at.verifier_prob_of_draft)
        return Judgement(~keep, mass, ~keep * at.total_variation)

    def residual(self, at: Positions, given: Parameters) -> Tensor:
        """max(0, p - q): only deferred positions are ever rejected, and their target is p."""
        return residual_of_verifier(at)

    def probabilities(self, at: Positions, given: Parameters) -> Tensor:
        """q or p, chosen for each position."""
        return torch.where(self.keep(at, given.alpha), at.drafter_probs, at.verifier_probs)


class _Dense(Target):
    """A target that is computed over the vocabulary wherever it is judged."""

    is_narrow = False

    def residual(self, at: Positions, given: Parameters) -> Tensor:
        """max(0, target - q)."""
        target = self.probabilities(at, given)
        return _or_target(target - at.drafter_probs, target)


@dataclass(frozen=True)
class KeptTokens(_Dense):
    """The target of a keep mask of width V: q(v) [v kept] + eta p(v) (eq. 11), eta = sum of q not kept."""

    keep: KeepRule

    def judge(self, at: Positions, given: Parameters) -> Judgement:
        """A kept token has mass q(x) + eta p(x) >= q(x), so it is always accepted."""
        keep = self.keep(at, given.alpha)
        kept = keep.gather(1, at.drafted[at.index][:, None])
        mixed = _mixed(at, keep)
        mass = kept * at.drafter_prob_of_draft + _eta(at, keep) * at.verifier_prob_of_draft
        return Judgement(~kept, mass, _rejection(at.drafter_probs, mixed))

    def probabilities(self, at: Positions, given: Parameters) -> Tensor:
        """The drafter's kept mass where it lies, the rest spread as the verifier would."""
        return _mixed(at, self.keep(at, given.alpha))


class Lossy(Target):
    """Lossy speculative decoding (Tran-Thien, 2023; section 2 and Lemma 2 of the paper).

    Accept with min(1, p / ((1 - alpha) q)), residual max(0, p / beta - q). alpha in [0, 1), 0 is
    lossless. With beta = 1 the closed form of Lemma 2 does not sum to one, so the target is defined
    by acceptance and residual; `probabilities` gives the law of what they emit. The tuned beta makes
    the closed form sum to one; it is never below 1 and changes nothing about what is rejected.
    """

    is_narrow = False
    defers = False

    def judge(self, at: Positions, given: Parameters) -> Judgement:
        """Nothing is deferred: there is no choice between models."""
        mass = at.verifier_prob_of_draft / (1 - given.alpha)
        rejection = _rejection(at.drafter_probs, self._accepted(at, given))
        return Judgement(torch.zeros_like(mass, dtype=torch.bool), mass, rejection)

    def residual(self, at: Positions, given: Parameters) -> Tensor:
        """max(0, p / beta - q)."""
        verifier_probs = at.verifier_probs
        beta, tuned = given.beta, given.beta.isnan()
        if tuned.any():
            beta = torch.where(tuned, self._tuned_beta(at, given), beta)
        return _or_target(verifier_probs / beta - at.drafter_probs, verifier_probs)

    def probabilities(self, at: Positions, given: Parameters) -> Tensor:
        """min(q, p / (1 - alpha)) plus the rejected mass spread by the residual."""
        accepted = self._accepted(at, given)
        residual = self.residual(at, given)
        rejected = 1 - accepted.sum(dim=-1, keepdim=True)
        return accepted + rejected * residual / residual.sum(dim=-1, keepdim=True)

    @staticmethod
    def _accepted(at: Positions, given: Parameters) -> Tensor:
        return torch.minimum(at.drafter_probs, at.verifier_probs / (1 - given.alpha))

    def _tuned_beta(self, at: Positions, given: Parameters) -> Tensor:
        """The beta >= 1 at which max(min(q, p / (1 - alpha)), p / beta) sums to one, (M, 1)."""
        accepted, verifier_probs = self._accepted(at, given).double(), at.verifier_probs.double()
        low = torch.zeros_like(given.alpha, dtype=torch.float64)  # of 1 / beta
        high = torch.ones_like(low)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            total = torch.maximum(accepted, middle * verifier_probs).sum(dim=-1, keepdim=True)
            low, high = torch.where(total < 1, middle, low), torch.where(total < 1, high, middle)
        return (1 / high).to(given.alpha.dtype)


@dataclass(frozen=True)
class Custom(_Dense):
    """A user's own T(q, p).

    `function(drafter_probs, verifier_probs, alpha)` gets the sampling distributions, float (M, V)
    each, and alpha as (M, 1) (NaN where the job gives none); it returns (M, V), rows that are not
    negative and sum to one. It must look at each row alone and must not change its arguments. A row
    that is no distribution ends that text with an error.
    """

    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    defers = False

    def judge(self, at: Positions, given: Parameters) -> Judgement:
        """Nothing is deferred; an invalid row has NaN mass, which is never accepted."""
        target = self.probabilities(at, given)
        valid = is_distribution(target)
        mass = target.gather(1, at.drafted[at.index][:, None]).masked_fill(~valid, torch.nan)
        no = torch.zeros_like(valid)
        return Judgement(no, mass, _rejection(at.drafter_probs, target))

    def probabilities(self, at: Positions, given: Parameters) -> Tensor:
        """What the function says."""
        return self.function(at.drafter_probs, at.verifier_probs, given.alpha)


def residual_of_verifier(at: Positions) -> Tensor:
    """max(0, p - q), the residual of every narrow target; p where it vanishes. (M, V)."""
    verifier_probs = at.verifier_probs
    return _or_target(verifier_probs - at.drafter_probs, verifier_probs)


def is_distribution(probs: Tensor) -> Tensor:
    """Whether rows are not negative and sum to one, up to rounding. (M, V) to bool (M, 1)."""
    right_sum = (probs.sum(dim=-1, keepdim=True) - 1).abs() <= _SUM_TOLERANCE
    return right_sum & (probs >= 0).all(dim=-1, keepdim=True)


def _eta(at: Positions, keep: Tensor) -> Tensor:
    return (at.drafter_probs * ~keep).sum(dim=-1, keepdim=True)


def _mixed(at: Positions, keep: Tensor) -> Tensor:
    return keep * at.drafter_probs + _eta(at, keep) * at.verifier_probs


def _rejection(drafter_probs: Tensor, target: Tensor) -> Tensor:
    return (drafter_probs - target).clamp_min(0).sum(dim=-1, keepdim=True)


def _or_target(difference: Tensor, target: Tensor) -> Tensor:
    """The positive part, or the target where it vanishes: equal distributions up to rounding."""
    residual = difference.clamp_min(0)
    vanished = residual.sum(dim=-1, keepdim=True) == 0
    return torch.where(vanished, target, residual)
