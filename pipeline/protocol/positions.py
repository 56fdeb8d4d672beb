"""What is known at the positions where drafted tokens are judged."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from pipeline.protocol.blocks import DrafterFacts
from pipeline.protocol.distributions import (
    confidence,
    draw,
    sampling_distribution,
    total_variation,
)
from pipeline.records import Sampling


class Distributions:
    """Both views of one model's logits: what is drawn from, and what rules look at. (N, V) each.

    Greedy ones (temperature 0) are one-hot; what is asked of them follows from the modes alone, and
    the vectors are made only for a target that is computed over the vocabulary.
    """

    def __init__(self, logits: Tensor, sampling: Sampling) -> None:
        self._logits, self._sampling = logits, sampling
        self.is_greedy = sampling.temperature == 0

    @cached_property
    def confidences(self) -> Tensor:
        """Untempered probabilities."""
        return confidence(self._logits)

    @cached_property
    def probs(self) -> Tensor:
        """The sampling distribution."""
        plain = self._sampling == Sampling(temperature=1.0)
        return self.confidences if plain else sampling_distribution(self._logits, self._sampling)

    @cached_property
    def peaks(self) -> Tensor:
        """The largest confidence of each position, (N, 1); NaN where the model is broken."""
        return self.confidences.amax(dim=-1, keepdim=True)

    @cached_property
    def modes(self) -> Tensor:
        """The most likely token of each position, int64 (N, 1)."""
        return self._logits.argmax(dim=-1, keepdim=True)

    @cached_property
    def entropies(self) -> Tensor:
        """Entropy of the confidences in nats, (N, 1)."""
        terms: Tensor = torch.special.entr(self.confidences)
        return terms.sum(dim=-1, keepdim=True)

    def confidences_in(self, tokens: Tensor) -> Tensor:
        """The confidence in one token of each position. (N,) to (N, 1)."""
        return self.confidences.gather(1, tokens[:, None])

    def probs_of(self, tokens: Tensor) -> Tensor:
        """The probability of drawing one token of each position. (N,) to (N, 1)."""
        if self.is_greedy:
            return (self.modes == tokens[:, None]).to(self._logits.dtype) + self._broken
        return self.probs.gather(1, tokens[:, None])

    def draw(self, uniforms: Tensor) -> Tensor:
        """Draw one token at each position. (N,) to int64 (N,)."""
        return self.modes[:, 0] if self.is_greedy else draw(self.probs, uniforms)

    @cached_property
    def _broken(self) -> Tensor:
        """NaN where the model gave no distribution, else 0. (N, 1)."""
        return 0 * self._logits.amax(dim=-1, keepdim=True)


class ShippedDistributions(Distributions):
    """A drafter's, known by the support that it samples from and by facts about its confidences.

    Args:
        logits: (N, V), -inf outside the support; None for greedy drafts, whose support is the draft.
    """

    def __init__(
        self, drafted: Tensor, logits: Tensor | None, sampling: Sampling, facts: DrafterFacts
    ) -> None:
        self.is_greedy = sampling.temperature == 0
        self.peaks = facts.peaks.flatten()[:, None]
        self.entropies = facts.entropies.flatten()[:, None]
        self._of_draft = facts.of_draft.flatten()[:, None]
        self._drafted, self._sampling = drafted, sampling
        if logits is not None:
            self._logits = logits

    @cached_property
    def confidences(self) -> Tensor:
        """Not known: raises `RuntimeError`. The transport was chosen so that no rule asks."""
        raise RuntimeError("the drafter's confidences were not shipped; use transport: float32")

    @cached_property
    def modes(self) -> Tensor:
        """The most likely token of each position, int64 (N, 1)."""
        return self._drafted[:, None] if self.is_greedy else self._logits.argmax(-1, keepdim=True)

    @cached_property
    def probs(self) -> Tensor:
        """The sampling distribution. Of greedy drafts it is never asked for; see `Positions`."""
        return sampling_distribution(self._logits, self._sampling)

    def confidences_in(self, tokens: Tensor) -> Tensor:
        """The confidence in the drafted tokens, which alone are known."""
        return self._of_draft

    def probs_of(self, tokens: Tensor) -> Tensor:
        """The probability of drawing one token of each position. (N,) to (N, 1)."""
        if self.is_greedy:
            return (self.modes == tokens[:, None]).to(self.peaks.dtype)
        return super().probs_of(tokens)


class Positions:
    """M chosen rows of N judged positions; wide tensors are gathered only when asked for.

    Args:
        drafter, verifier: the distributions of both models at all N positions.
        drafted: int64 (N,), the drafted tokens.
        index: int64 (M,), the rows chosen; None is all of them.
    """

    def __init__(
        self,
        drafter: Distributions,
        verifier: Distributions,
        drafted: Tensor,
        index: Tensor | None = None,
    ) -> None:
        self.drafter, self.verifier, self.drafted = drafter, verifier, drafted
        self.index = torch.arange(len(drafted), device=drafted.device) if index is None else index
        # Not itself: a cycle would keep the probabilities of a round until the collector comes by.
        self._whole: Positions | None = None

    def take(self, index: Tensor) -> Positions:
        """The rows `index` of all N positions. What was computed once for all is shared."""
        chosen = Positions(self.drafter, self.verifier, self.drafted, index)
        chosen._whole = self._shared
        return chosen

    @property
    def _shared(self) -> Positions:
        """All positions, where what is computed once for all is kept."""
        return self if self._whole is None else self._whole

    @property
    def drafter_probs(self) -> Tensor:
        """q, the drafter's sampling distribution, (M, V)."""
        return self._shared._all_drafter_probs[self.index]

    @property
    def verifier_probs(self) -> Tensor:
        """p, the verifier's sampling distribution, (M, V)."""
        return self.verifier.probs[self.index]

    @property
    def drafter_confidence(self) -> Tensor:
        """The drafter's untempered probabilities, (M, V)."""
        return self.drafter.confidences[self.index]

    @property
    def verifier_confidence(self) -> Tensor:
        """The verifier's untempered probabilities, (M, V)."""
        return self.verifier.confidences[self.index]

    @property
    def drafter_max(self) -> Tensor:
        """The drafter's largest confidence, (M, 1)."""
        return self.drafter.peaks[self.index]

    @property
    def verifier_max(self) -> Tensor:
        """The verifier's largest confidence, (M, 1)."""
        return self.verifier.peaks[self.index]

    @property
    def drafter_entropy(self) -> Tensor:
        """H(q) of the drafter's confidence in nats, (M, 1)."""
        return self.drafter.entropies[self.index]

    @property
    def verifier_entropy(self) -> Tensor:
        """H(p) of the verifier's confidence in nats, (M, 1)."""
        return self.verifier.entropies[self.index]

    @property
    def verifier_loss_of_drafter_mode(self) -> Tensor:
        """-log p(argmax q) in nats, both confidences, (M, 1)."""
        confidence = self._shared._all_confidence_in_mode[self.index]
        return -confidence.log()

    @property
    def total_variation(self) -> Tensor:
        """D_TV of the sampling distributions, (M, 1)."""
        return self._shared._all_total_variation[self.index]

    @property
    def drafter_confidence_of_draft(self) -> Tensor:
        """The drafter's untempered probability of the drafted token, (M, 1)."""
        return self._shared._all_drafter_confidence_of_draft[self.index]

    @property
    def drafter_prob_of_draft(self) -> Tensor:
        """q(x) of the drafted token x, (M, 1)."""
        return self._shared._all_draft_probs[0][self.index]

    @property
    def verifier_prob_of_draft(self) -> Tensor:
        """p(x) of the drafted token x, (M, 1)."""
        return self._shared._all_draft_probs[1][self.index]

    @cached_property
    def _all_confidence_in_mode(self) -> Tensor:
        return self.verifier.confidences.gather(1, self.drafter.modes)

    @cached_property
    def _all_drafter_probs(self) -> Tensor:
        if not self.drafter.is_greedy:
            return self.drafter.probs
        # Greedy drafts may have been shipped as tokens alone; the verifier knows the vocabulary.
        return torch.zeros_like(self.verifier.probs).scatter_(1, self.drafter.modes, 1.0)

    @cached_property
    def _all_total_variation(self) -> Tensor:
        if self.drafter.is_greedy:
            return 1 - self.verifier.probs_of(self.drafter.modes[:, 0])
        if self.verifier.is_greedy:
            return 1 - self.drafter.probs_of(self.verifier.modes[:, 0])
        return total_variation(self.drafter.probs, self.verifier.probs)[:, None]

    @cached_property
    def _all_drafter_confidence_of_draft(self) -> Tensor:
        return self.drafter.confidences_in(self.drafted)

    @cached_property
    def _all_draft_probs(self) -> tuple[Tensor, Tensor]:
        return self.drafter.probs_of(self.drafted), self.verifier.probs_of(self.drafted)
