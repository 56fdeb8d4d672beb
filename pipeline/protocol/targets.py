"""Target distributions: what a speculative strategy must sample from, given both models.

A target says three things about a position: whether the drafted token is a deferral, how much
target mass it has (the acceptance test is `u q(x) < mass`), and the residual to draw from after a
rejection. The dense distribution is there for proofs and reports; decoding never builds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.protocol.positions import Positions
from pipeline.protocol.rules import KeepRule


@dataclass(frozen=True)
class Judgement:
    """What a target says of M drafted tokens, each (M, 1): is it a deferral, and its target mass."""

    deferred: Tensor
    mass: Tensor


class Target(ABC):
    """T(q, p) of the paper's Algorithm 4, with its parameters as columns alpha and beta (M, 1)."""

    shared_residual = True
    """Whether the residual depends on the position alone, not on alpha and beta."""

    @abstractmethod
    def judge(self, at: Positions, alpha: Tensor) -> Judgement:
        """Judge the drafted tokens."""

    @abstractmethod
    def residual(self, at: Positions, alpha: Tensor, beta: Tensor) -> Tensor:
        """Unnormalised residual weights max(0, target - q), (M, V); the target where all are zero."""

    @abstractmethod
    def probabilities(self, at: Positions, alpha: Tensor, beta: Tensor) -> Tensor:
        """The dense target distribution, (M, V)."""


@dataclass(frozen=True)
class Kept(Target):
    """The target of a keep mask of width 1: q where it keeps, p where it defers (eq. 6)."""

    keep: KeepRule

    def judge(self, at: Positions, alpha: Tensor) -> Judgement:
        """Where the rule keeps, the mass is q(x), so the token is always accepted."""
        keep = self.keep(at, alpha)
        mass = torch.where(keep, at.drafter_prob_of_draft, at.verifier_prob_of_draft)
        return Judgement(~keep, mass)

    def residual(self, at: Positions, alpha: Tensor, beta: Tensor) -> Tensor:
        """max(0, p - q): only deferred positions are ever rejected, and their target is p."""
        verifier_probs = at.verifier_probs
        return _or_target(verifier_probs - at.drafter_probs, verifier_probs)

    def probabilities(self, at: Positions, alpha: Tensor, beta: Tensor) -> Tensor:
        """q or p, chosen for each position."""
        return torch.where(self.keep(at, alpha), at.drafter_probs, at.verifier_probs)


@dataclass(frozen=True)
class KeptTokens(Target):
    """The target of a keep mask of width V: q(v) [v kept] + eta p(v) (eq. 11), eta = sum of q not kept."""

    keep: KeepRule
    shared_residual = False

    def judge(self, at: Positions, alpha: Tensor) -> Judgement:
        """A kept token has mass q(x) + eta p(x) >= q(x), so it is always accepted."""
        keep = self.keep(at, alpha)
        kept = keep.gather(1, at.drafted[at.index][:, None])
        eta = self._eta(at, keep)
        mass = kept * at.drafter_prob_of_draft + eta * at.verifier_prob_of_draft
        return Judgement(~kept, mass)

    def residual(self, at: Positions, alpha: Tensor, beta: Tensor) -> Tensor:
        """max(0, target - q) is eta p(v) for kept tokens and max(0, eta p(v) - q(v)) for others."""
        target = self.probabilities(at, alpha, beta)
        return _or_target(target - at.drafter_probs, target)

    def probabilities(self, at: Positions, alpha: Tensor, beta: Tensor) -> Tensor:
        """The drafter's kept mass where it lies, the rest spread as the verifier would."""
        keep = self.keep(at, alpha)
        return keep * at.drafter_probs + self._eta(at, keep) * at.verifier_probs

    @staticmethod
    def _eta(at: Positions, keep: Tensor) -> Tensor:
        return (at.drafter_probs * ~keep).sum(dim=-1, keepdim=True)


class Lossy(Target):
    """Lossy speculative decoding (Tran-Thien, 2023; section 2 and Lemma 2 of the paper).

    Accept with min(1, p / ((1 - alpha) q)), residual max(0, p / beta - q). alpha in [0, 1), 0 is
    lossless. With beta = 1 the closed form of Lemma 2 does not sum to one, so the target is defined
    by acceptance and residual; `probabilities` gives the law of what they emit.
    """

    shared_residual = False

    def judge(self, at: Positions, alpha: Tensor) -> Judgement:
        """Nothing is deferred: there is no choice between models."""
        mass = at.verifier_prob_of_draft / (1 - alpha)
        return Judgement(torch.zeros_like(mass, dtype=torch.bool), mass)

    def residual(self, at: Positions, alpha: Tensor, beta: Tensor) -> Tensor:
        """max(0, p / beta - q)."""
        verifier_probs = at.verifier_probs
        return _or_target(verifier_probs / beta - at.drafter_probs, verifier_probs)

    def probabilities(self, at: Positions, alpha: Tensor, beta: Tensor) -> Tensor:
        """min(q, p / (1 - alpha)) plus the rejected mass spread by the residual."""
        accepted = torch.minimum(at.drafter_probs, at.verifier_probs / (1 - alpha))
        residual = self.residual(at, alpha, beta)
        rejected = 1 - accepted.sum(dim=-1, keepdim=True)
        return accepted + rejected * residual / residual.sum(dim=-1, keepdim=True)


def _or_target(difference: Tensor, target: Tensor) -> Tensor:
    """The positive part, or the target where it vanishes: equal distributions up to rounding."""
    residual = difference.clamp_min(0)
    vanished = residual.sum(dim=-1, keepdim=True) == 0
    return torch.where(vanished, target, residual)
