"""The protocol once more, slow and plain: one example, one strategy, one token at a time.

Written from the paper (Narasimhan et al., ICLR 2025) and not from the engine, in float64 with numpy;
of the pipeline it uses only the records and the uniforms, so that both face the same chance. Models
are functions from (prompt, output so far) to a row of logits: a table, or a `transformers` model
without a cache. Symbols are the paper's: q drafter, p verifier, pi target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from pipeline.randomness import Role, example_key, uniforms
from pipeline.records import Counts, FinishReason, Sampling, Setting, Strategy

Row = NDArray[np.float64]
NextLogits = Callable[[tuple[int, ...], tuple[int, ...]], Row]


@dataclass(frozen=True)
class Models:
    drafter: NextLogits
    verifier: NextLogits


@dataclass(frozen=True)
class Decoded:
    """What one strategy makes of one example; `accepted` has one number for each round."""

    output_ids: tuple[int, ...]
    finish_reason: FinishReason
    counts: Counts
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chance:
    """All uniforms of one (example, repeat), by role and output position."""

    table: NDArray[np.float64]

    def __call__(self, role: Role, position: int) -> float:
        return float(self.table[role, position])


# --- models ---------------------------------------------------------------------------------------


def table_model(logits: torch.Tensor) -> NextLogits:
    """A Markov chain: row t of the table holds the logits behind token t."""
    rows = logits.double().numpy()
    return lambda prompt, output: rows[(prompt + output)[-1]]


def causal_model(model: PreTrainedModel, vocabulary: int) -> NextLogits:
    """A decoder-only model of `transformers`, run over the whole text for every token."""

    @cache
    def logits(prompt: tuple[int, ...], output: tuple[int, ...]) -> Row:
        ids = torch.tensor([prompt + output], device=model.device)
        with torch.inference_mode():
            row = model(input_ids=ids, use_cache=False).logits[0, -1, :vocabulary]
        return row.double().cpu().numpy()

    return logits


def seq2seq_model(model: PreTrainedModel, vocabulary: int) -> NextLogits:
    """An encoder-decoder model of `transformers`, run over the whole text for every token."""
    start = model.config.decoder_start_token_id

    @cache
    def logits(prompt: tuple[int, ...], output: tuple[int, ...]) -> Row:
        source = torch.tensor([prompt], device=model.device)
        written = torch.tensor([(start, *output)], device=model.device)
        with torch.inference_mode():
            result = model(input_ids=source, decoder_input_ids=written, use_cache=False)
        return result.logits[0, -1, :vocabulary].double().cpu().numpy()

    return logits


# --- distributions --------------------------------------------------------------------------------


def softmax(logits: Row) -> Row:
    exps = np.exp(logits - logits.max())
    return exps / exps.sum()


def sampling_probs(logits: Row, sampling: Sampling) -> Row:
    """Temperature, then top-k, top-p and min-p, each on what the one before it left."""
    if sampling.temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    probs = softmax(logits / sampling.temperature)
    if sampling.top_k is not None:
        kth = np.sort(probs)[::-1][min(sampling.top_k, len(probs)) - 1]
        probs = np.where(probs >= kth, probs, 0.0)
        probs /= probs.sum()
    if sampling.top_p is not None:
        mass = 0.0
        for token in np.argsort(-probs, kind="stable"):
            if mass >= sampling.top_p:
                probs[token] = 0.0
            mass += probs[token]
        probs /= probs.sum()
    if sampling.min_p is not None:
        probs = np.where(probs >= sampling.min_p * probs.max(), probs, 0.0)
        probs /= probs.sum()
    return probs


def draw(weights: Row, u: float) -> int:
    """Inverse-CDF sampling from weights that need not sum to one."""
    cumulative = np.cumsum(weights)
    return int(np.argmax(cumulative > u * cumulative[-1]))


# --- rules and targets ----------------------------------------------------------------------------


@dataclass(frozen=True)
class At:
    """Both models at one position: what they draw from, and their confidences (at temperature 1)."""

    q: Row
    p: Row
    confident_q: Row
    confident_p: Row

    @classmethod
    def of(cls, q_logits: Row, p_logits: Row, sampling: Sampling) -> At:
        return cls(
            sampling_probs(q_logits, sampling), sampling_probs(p_logits, sampling),
            softmax(q_logits), softmax(p_logits),
        )  # fmt: skip

    @property
    def total_variation(self) -> float:
        return float(np.maximum(0, self.p - self.q).sum())


def defers(use: str, alpha: float, at: At) -> NDArray[np.bool_]:
    """r of the paper, for each token of the vocabulary: True where the rule defers to the verifier."""
    max_q, max_p = at.confident_q.max(), at.confident_p.max()
    rule = use.split(".")[-1]
    if rule == "token_v3":
        return at.confident_p < (1 - alpha) * max_p
    r = {
        "drafter": lambda: False,
        "verifier": lambda: True,
        "spec_decode": lambda: True,
        "lossy_spec_decode": lambda: False,
        "chow": lambda: max_q < 1 - alpha,
        "diff": lambda: max_q < max_p - alpha,
        "opt": lambda: max_q < max_p - alpha * at.total_variation,
    }[rule]()
    return np.full(len(at.q), r)


def acceptance(strategy: Strategy, at: At) -> Row:
    """For each token, the mass that its acceptance test compares with u q(x)."""
    if strategy.use == "lossy_spec_decode":
        return at.p / (1 - (strategy.alpha or 0.0))
    return target(strategy, at)


def residual(strategy: Strategy, at: At) -> Row:
    """What replaces a rejected token is drawn from these weights."""
    beta = strategy.beta if isinstance(strategy.beta, float) else 1.0
    goal = at.p / beta if strategy.use == "lossy_spec_decode" else target(strategy, at)
    weights = np.maximum(0, goal - at.q)
    return weights if weights.sum() > 0 else goal


def target(strategy: Strategy, at: At) -> Row:
    """pi = q (1 - r) + p sum(r q), eq. 11; with an r that is all zeros or ones, eq. 6."""
    if strategy.use == "lossy_spec_decode":
        accepted = np.minimum(at.q, acceptance(strategy, at))
        weights = residual(strategy, at)
        return accepted + (1 - accepted.sum()) * weights / weights.sum()
    r = defers(strategy.use, strategy.alpha or 0.0, at)
    if r.all() or not r.any():
        return at.p if r.all() else at.q
    return at.q * ~r + at.p * (at.q * r).sum()


# --- decoding -------------------------------------------------------------------------------------


def decode(
    models: Models,
    prompt: Sequence[int],
    example_id: str,
    repeat: int,
    strategy: Strategy,
    setting: Setting,
) -> Decoded:
    """One strategy on one example, from the first token to the last."""
    text = _Text(models, tuple(prompt), _chance(setting, example_id, repeat), strategy, setting)
    family = strategy.use.split(".")[0]
    if family in ("drafter", "verifier", "token_cascade"):
        return text.sequential()
    return text.speculative()


@lru_cache(maxsize=4096)
def _chance_table(seed: int, example_id: str, repeat: int, length: int) -> NDArray[np.float64]:
    key = torch.tensor([example_key(example_id)])
    positions = torch.arange(length)[None]
    rows = [uniforms(seed, key, torch.tensor([repeat]), positions, role) for role in Role]
    return torch.cat(rows).numpy()


def _chance(setting: Setting, example_id: str, repeat: int) -> Chance:
    return Chance(_chance_table(setting.seed, example_id, repeat, setting.max_new_tokens))


class _Text:
    def __init__(
        self,
        models: Models,
        prompt: tuple[int, ...],
        chance: Chance,
        strategy: Strategy,
        setting: Setting,
    ) -> None:
        self.models, self.prompt, self.chance = models, prompt, chance
        self.strategy, self.setting = strategy, setting
        self.output: tuple[int, ...] = ()

    def at(self, written: tuple[int, ...]) -> At:
        q_logits = self.models.drafter(self.prompt, written)
        return At.of(q_logits, self.models.verifier(self.prompt, written), self.setting.sampling)

    def reason(self, written: tuple[int, ...]) -> FinishReason | None:
        if written and written[-1] in self.setting.eos_token_ids:
            return "stop"
        return "length" if len(written) == self.setting.max_new_tokens else None

    def sequential(self) -> Decoded:
        """The drafter or the verifier alone, and Algorithm 2: at each token one of the two draws."""
        deferred = 0
        while not (reason := self.reason(self.output)):
            at = self.at(self.output)
            defer = bool(defers(self.strategy.use, self.strategy.alpha or 0.0, at)[0])
            u = self.chance(Role.DRAFT, len(self.output))
            self.output += (draw(at.p if defer else at.q, u),)
            deferred += defer
        drafter_calls = 0 if self.strategy.use == "verifier" else len(self.output)
        counts = Counts(
            drafter_calls=drafter_calls,
            verifier_calls=deferred,
            verifier_tokens=deferred,
            deferred=deferred,
        )
        return Decoded(self.output, reason, counts)

    def speculative(self) -> Decoded:
        """Algorithm 4: draft a block, judge it, replace the first rejected token or add a bonus."""
        setting, strategy = self.setting, self.strategy
        sums = dict.fromkeys(("drafted", "scored", "rejected", "deferred", "bonus"), 0)
        accepted_by_round: list[int] = []
        while not (reason := self.reason(self.output)):
            drafted = self.draft()
            whole = self.output + tuple(drafted)
            accepted = 0
            for x in drafted:
                position = len(self.output)
                at = self.at(self.output)
                sums["deferred"] += bool(defers(strategy.use, strategy.alpha or 0.0, at)[x])
                if self.chance(Role.ACCEPT, position) * at.q[x] < acceptance(strategy, at)[x]:
                    self.output += (x,)
                    accepted += 1
                    continue
                u = self.chance(Role.RESIDUAL, position)
                self.output += (draw(residual(strategy, at), u),)
                sums["rejected"] += 1
                break
            # Whether the verifier is asked for a token behind the block, should it be taken whole.
            asked = (
                setting.bonus == "verifier"
                and len(drafted) == setting.block_size
                and self.reason(whole) is None
            )
            if asked and accepted == len(drafted):
                u = self.chance(Role.BONUS, len(whole))
                self.output += (draw(self.at(whole).p, u),)
                sums["bonus"] += 1
            sums["drafted"] += len(drafted)
            sums["scored"] += len(drafted) + asked
            accepted_by_round.append(accepted)
        histogram = np.bincount(accepted_by_round, minlength=setting.draft_length + 1)
        counts = Counts(
            drafter_calls=sums["drafted"],
            verifier_calls=len(accepted_by_round),
            verifier_tokens=sums["scored"],
            drafted=sums["drafted"],
            accepted=sum(accepted_by_round),
            rejected=sums["rejected"],
            deferred=sums["deferred"],
            bonus_tokens=sums["bonus"],
            rounds=len(accepted_by_round),
            accepted_histogram=tuple(histogram.tolist()),
        )
        return Decoded(self.output, reason, counts, tuple(accepted_by_round))

    def draft(self) -> list[int]:
        """At most a block, at most the budget, nothing behind the end of the text."""
        written = self.output
        drafted: list[int] = []
        while len(drafted) < self.setting.draft_length and self.reason(written) is None:
            q = sampling_probs(self.models.drafter(self.prompt, written), self.setting.sampling)
            drafted.append(draw(q, self.chance(Role.DRAFT, len(written))))
            written += (drafted[-1],)
        return drafted
