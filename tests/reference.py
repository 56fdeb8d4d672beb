"""The protocol once more, slow and plain: one example, one strategy, one token at a time.

Written from the paper (Narasimhan et al., ICLR 2025) and not from the engine, in float64 with numpy;
of the pipeline it uses only the records and the uniforms, so that both face the same chance. Models
are functions from (prompt, output so far) to a row of logits: a table, or a `transformers` model
without a cache. Symbols are the paper's: q drafter, p verifier, pi target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    expected_rejected: float = 0.0
    expected_loss: float = 0.0
    log_confidence: float = 0.0


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
    def of(cls, q_logits: Row, p_logits: Row, setting: Setting) -> At:
        return cls(
            sampling_probs(q_logits, setting.drafter_sampling or setting.sampling),
            sampling_probs(p_logits, setting.sampling),
            softmax(q_logits),
            softmax(p_logits),
        )

    @property
    def total_variation(self) -> float:
        return float(np.maximum(0, self.p - self.q).sum())


def entropy(probs: Row) -> float:
    positive = probs[probs > 0]
    return float(-(positive * np.log(positive)).sum())


def defers(strategy: Strategy, at: At) -> NDArray[np.bool_]:
    """r of the paper, for each token of the vocabulary: True where the rule defers to the verifier."""
    max_q, max_p = at.confident_q.max(), at.confident_p.max()
    alpha = strategy.rollback if strategy.use == "bild" else strategy.alpha
    alpha = 0.0 if alpha is None else alpha
    rules: dict[str, Callable[[], bool | NDArray[np.bool_]]] = {
        "drafter": lambda: False,
        "verifier": lambda: True,
        "spec_decode": lambda: True,
        "lossy_spec_decode": lambda: False,
        "custom": lambda: False,
        "chow": lambda: max_q < 1 - alpha,
        "diff": lambda: max_q < max_p - alpha,
        "opt": lambda: max_q < max_p - alpha * at.total_variation,
        "entropy": lambda: entropy(at.confident_q) > alpha,
        "chow_log": lambda: entropy(at.confident_q) > alpha,
        "diff_log": lambda: entropy(at.confident_q) > entropy(at.confident_p) + alpha,
        "opt_log": lambda: (
            entropy(at.confident_q) > entropy(at.confident_p) + alpha * at.total_variation
        ),
        "bild_star": lambda: -np.log(at.confident_p[at.confident_q.argmax()]) > alpha,
        "bild": lambda: -np.log(at.confident_p[at.confident_q.argmax()]) > alpha,
        "token_v1": lambda: at.confident_q < max_p - alpha,
        "token_v2": lambda: at.confident_p < max_p - alpha,
        "token_v3": lambda: at.confident_p < (1 - alpha) * max_p,
    }
    return np.broadcast_to(rules[strategy.use.split(".")[-1]](), at.q.shape)


def acceptance(strategy: Strategy, at: At) -> Row:
    """For each token, the mass that its acceptance test compares with u q(x)."""
    if strategy.use == "lossy_spec_decode":
        return at.p / (1 - (strategy.alpha or 0.0))
    return target(strategy, at)


def residual(strategy: Strategy, at: At) -> Row:
    """What replaces a rejected token is drawn from these weights."""
    if strategy.use == "lossy_spec_decode":
        beta = tuned_beta(strategy, at) if strategy.beta == "tuned" else strategy.beta
        goal, fallback = at.p / beta, at.p
    else:
        goal = fallback = target(strategy, at)
    weights = np.maximum(0, goal - at.q)
    return weights if weights.sum() > 0 else fallback


def tuned_beta(strategy: Strategy, at: At) -> float:
    """The beta at which max(min(q, p / (1 - alpha)), p / beta) of Lemma 2 sums to one."""
    accepted = np.minimum(at.q, acceptance(strategy, at))
    low, high = 1.0, 1e9
    for _ in range(200):
        beta = (low + high) / 2
        if np.maximum(accepted, at.p / beta).sum() > 1:
            low = beta
        else:
            high = beta
    return high


def target(strategy: Strategy, at: At) -> Row:
    """pi = q (1 - r) + p sum(r q), eq. 11; with an r that is all zeros or ones, eq. 6."""
    if strategy.use == "lossy_spec_decode":
        accepted = np.minimum(at.q, acceptance(strategy, at))
        weights = residual(strategy, at)
        return accepted + (1 - accepted.sum()) * weights / weights.sum()
    if strategy.use == "custom":
        assert strategy.target == "tests.targets:mixture"
        alpha = strategy.alpha or 0.0
        return alpha * at.q + (1 - alpha) * at.p
    r = defers(strategy, at)
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
    if family in ("drafter", "verifier", "token_cascade", "oracle_cascade"):
        return text.sequential()
    if family == "sequence_cascade":
        one, other = (replace(strategy, use=use) for use in ("drafter", "verifier"))
        of_drafter = decode(models, prompt, example_id, repeat, one, setting)
        of_verifier = decode(models, prompt, example_id, repeat, other, setting)
        return sequence_cascade(strategy, of_drafter, of_verifier)
    return text.speculative()


def sequence_cascade(strategy: Strategy, of_drafter: Decoded, of_verifier: Decoded) -> Decoded:
    """The drafter's whole answer where it is sure enough of it, otherwise the verifier's as well."""
    length = len(of_drafter.output_ids) if strategy.normalize == "mean" else 1
    if np.exp(of_drafter.log_confidence / length) >= 1 - (strategy.alpha or 0.0):
        return of_drafter
    calls = of_drafter.counts.drafter_calls
    return replace(of_verifier, counts=replace(of_verifier.counts, drafter_calls=calls))


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
        return At.of(q_logits, self.models.verifier(self.prompt, written), self.setting)

    def reason(self, written: tuple[int, ...]) -> FinishReason | None:
        if written and written[-1] in self.setting.eos_token_ids:
            return "stop"
        return "length" if len(written) == self.setting.max_new_tokens else None

    def sequential(self) -> Decoded:
        """One model alone, Algorithms 2 and 3: at each token one of the two draws."""
        deferred, log_confidence = 0, 0.0
        while not (reason := self.reason(self.output)):
            at = self.at(self.output)
            defer = bool(defers(self.strategy, at)[0])
            u = self.chance(Role.DRAFT, len(self.output))
            token = draw(at.p if defer else at.q, u)
            log_confidence += float(np.log(at.confident_q[token]))
            self.output += (token,)
            deferred += defer
        oracle = self.strategy.use.startswith("oracle_cascade")
        verifier_calls = len(self.output) if oracle else deferred
        counts = Counts(
            drafter_calls=0 if self.strategy.use == "verifier" else len(self.output),
            verifier_calls=verifier_calls,
            verifier_tokens=verifier_calls,
            deferred=deferred,
        )
        if self.strategy.use != "drafter":
            log_confidence = 0.0
        return Decoded(self.output, reason, counts, log_confidence=log_confidence)

    def speculative(self) -> Decoded:
        """Algorithm 4: draft a block, judge it, replace the first rejected token or add a bonus."""
        setting, strategy = self.setting, self.strategy
        sums: Counter[str] = Counter()
        accepted_by_round: list[int] = []
        while not (reason := self.reason(self.output)):
            drafted, fell_back = self.draft()
            whole = self.output + tuple(drafted)
            accepted = 0
            for x in drafted:
                position = len(self.output)
                at = self.at(self.output)
                r = bool(defers(strategy, at)[x])
                sums["deferred"] += r
                sums["loss"] += 1 - (at.confident_p if r else at.confident_q).max()
                mass = acceptance(strategy, at)
                sums["expected_rejected"] += np.maximum(0, at.q - mass).sum()
                if self.chance(Role.ACCEPT, position) * at.q[x] < mass[x]:
                    self.output += (x,)
                    accepted += 1
                    continue
                u = self.chance(Role.RESIDUAL, position)
                self.output += (draw(residual(strategy, at), u),)
                sums["rejected"] += 1
                break
            # Whether the verifier is asked for a token behind the block, should it be taken whole.
            full = setting.bonus == "verifier" and len(drafted) == setting.block_size
            asked = (full or fell_back) and self.reason(whole) is None
            if asked and accepted == len(drafted):
                u = self.chance(Role.BONUS, len(whole))
                self.output += (draw(self.at(whole).p, u),)
                sums["bonus"] += 1
                sums["deferred"] += fell_back
            sums["drafted"] += len(drafted)
            sums["drafter_calls"] += len(drafted) + fell_back
            sums["scored"] += len(drafted) + asked
            accepted_by_round.append(accepted)
        histogram = np.bincount(accepted_by_round, minlength=setting.draft_length + 1)
        counts = Counts(
            drafter_calls=sums["drafter_calls"],
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
        no_choice = strategy.use in ("lossy_spec_decode", "custom")
        return Decoded(
            self.output,
            reason,
            counts,
            tuple(accepted_by_round),
            expected_rejected=float(sums["expected_rejected"]),
            expected_loss=float("nan") if no_choice else float(sums["loss"]),
        )

    def draft(self) -> tuple[list[int], bool]:
        """At most a block, at most the budget, nothing behind the end of the text.

        BiLD looks at the drafter first and leaves the token to the verifier where it is not sure.
        """
        written = self.output
        drafted: list[int] = []
        while len(drafted) < self.setting.draft_length and self.reason(written) is None:
            logits = self.models.drafter(self.prompt, written)
            if (
                self.strategy.fallback is not None
                and softmax(logits).max() < self.strategy.fallback
            ):
                return drafted, True
            q = sampling_probs(logits, self.setting.drafter_sampling or self.setting.sampling)
            drafted.append(draw(q, self.chance(Role.DRAFT, len(written))))
            written += (drafted[-1],)
        return drafted, False
