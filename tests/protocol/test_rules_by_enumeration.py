"""Each rule, exactly: what is emitted at a position has the law of the paper's target.

For small vocabularies every drafted token is enumerated; its acceptance has probability
min(1, mass / q(x)) over the uniform, and a rejection draws from the normalised residual. The
expected targets come from `tests/reference.py`, written from the paper. Throughout, q is the
drafter's distribution, p the verifier's.

Planted faults these tests catch: `>` for `>=` and tempered for untempered maxima in a rule; a sign
of alpha; total variation that is halved, two-sided or of the confidences; eta summed over p; the
residual q - p, of the target where it should be of p, passed through a softmax, or of p / (1 - alpha);
acceptance p / q for a kept token; a judged q that is not the drawn q; NaN from a zero residual.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.protocol.distributions import confidence
from pipeline.protocol.positions import Distributions, Positions
from pipeline.protocol.strategies import KINDS, sweep, target_of
from pipeline.protocol.targets import Kept, KeptTokens, Parameters
from pipeline.records import Sampling, Setting, Strategy
from tests import reference
from tests.strategies import AT_ANY_TEMPERATURE, EVERY, is_speculative

STRATEGIES = AT_ANY_TEMPERATURE
SPECULATIVE = [strategy for strategy in STRATEGIES if is_speculative(strategy)]
CASCADES = [s for s in SPECULATIVE if isinstance(target_of(s), Kept)]
TOKEN_RULES = [s for s in SPECULATIVE if isinstance(target_of(s), KeptTokens)]
LOG_6 = math.log(6) + 1e-9  # the largest entropy there is here
FULL = Sampling(1.0)
SAMPLINGS = [Sampling(0.0), Sampling(0.5), FULL]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def logits(vocabulary: int, rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random pairs, some nearly equal, some nearly certain, some far apart; (rows, V) each."""
    generator = torch.Generator().manual_seed(1000 * vocabulary + seed)
    noise = torch.randn(2, rows, vocabulary, generator=generator, dtype=torch.float64)
    # In float32, models that are certain or almost equal have ties that rounding decides.
    exact = dtype == torch.float64
    spreads = [0.3, 1.0, 3.0, 4.0 if exact else 2.0]
    distances = [1.0, 1.0, 0.1, 1e-3 if exact else 0.05, 1.0]
    spread = torch.tensor(spreads, dtype=torch.float64).repeat(rows)[:rows, None]
    closeness = torch.tensor(distances, dtype=torch.float64).repeat(rows)[:rows, None]
    drafter = spread * noise[0]
    return drafter.to(dtype), (drafter + closeness * spread * noise[1]).to(dtype)


def strategy(use: str, alpha: float | None = None) -> Strategy:
    """Also with an alpha outside the range that a job may give."""
    return Strategy(use, alpha, beta=1.0 if use == "lossy_spec_decode" else None)


class Case:
    """All drafted tokens at all rows, judged by a strategy. N rows, V vocabulary."""

    def __init__(
        self,
        strategy: Strategy,
        q_logits: Tensor,
        p_logits: Tensor,
        drafting: Sampling,
        verifying: Sampling | None = None,
    ) -> None:
        verifying = verifying or drafting
        self.q = Distributions(q_logits, drafting).probs
        self.p = Distributions(p_logits, verifying).probs
        rows, vocabulary = self.q.shape
        each = torch.arange(rows).repeat_interleave(vocabulary)
        at = Positions(
            Distributions(q_logits[each], drafting),
            Distributions(p_logits[each], verifying),
            drafted=torch.arange(vocabulary).repeat(rows),
        )
        given = Parameters(*(column(p, each, self.q) for p in (strategy.alpha, strategy.beta)))
        target = target_of(strategy)
        judgement = target.judge(at, given)
        self.deferred = judgement.deferred.view(rows, vocabulary)
        self.mass = judgement.mass.view(rows, vocabulary)
        self.reported_rejection = judgement.rejection.view(rows, vocabulary)
        self.residual = target.residual(at, given).view(rows, vocabulary, -1)[:, 0]
        self.dense = target.probabilities(at, given).view(rows, vocabulary, -1)[:, 0]

    @property
    def acceptance(self) -> Tensor:
        """The probability over u that u q(x) < mass(x); 1 where the token is never drafted."""
        return torch.where(self.q > 0, self.mass / self.q, 1).clamp(0, 1)

    @property
    def rejection(self) -> Tensor:
        """(N,)."""
        return (self.q * (1 - self.acceptance)).sum(dim=-1)

    @property
    def emitted(self) -> Tensor:
        """The law of the emitted token, (N, V)."""
        residual = self.residual / self.residual.sum(dim=-1, keepdim=True)
        return self.q * self.acceptance + self.rejection[:, None] * residual


def column(value: float | str | None, rows: Tensor, like: Tensor) -> Tensor:
    number = value if isinstance(value, float) else torch.nan
    return torch.full((len(rows), 1), number, dtype=like.dtype)


def cases(
    strategy: Strategy, sampling: Sampling, dtype: torch.dtype
) -> Iterator[tuple[Case, Tensor]]:
    """A case for each vocabulary size and the reference's targets for it."""
    for vocabulary in (2, 3, 6):
        q_logits, p_logits = logits(vocabulary, 20, dtype)
        ats = [
            reference.At.of(q, p, Setting(1, 1, sampling))
            for q, p in zip(q_logits.double().numpy(), p_logits.double().numpy(), strict=True)
        ]
        case = Case(strategy, q_logits, p_logits, sampling)
        yield case, torch.from_numpy(np.stack([reference.target(strategy, at) for at in ats]))


all_strategies = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.label)
speculative = pytest.mark.parametrize("strategy", SPECULATIVE, ids=lambda s: s.label)
any_sampling = pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T={s.temperature:g}")
any_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@all_strategies
@any_dtype
def test_target_is_the_papers_and_sums_to_one(strategy: Strategy, dtype: torch.dtype) -> None:
    for sampling in SAMPLINGS:
        for case, expected in cases(strategy, sampling, dtype):
            torch.testing.assert_close(case.dense.double(), expected, atol=TOLERANCE[dtype], rtol=0)
            assert (case.dense.double().sum(dim=-1) - 1).abs().max() < TOLERANCE[dtype]


@speculative
@any_dtype
def test_emitted_token_has_the_law_of_the_target(strategy: Strategy, dtype: torch.dtype) -> None:
    """And it is rejected with probability sum max(0, q - target)."""
    within = {"atol": TOLERANCE[dtype], "rtol": 0}
    for sampling in SAMPLINGS:
        for case, expected in cases(strategy, sampling, dtype):
            assert (case.residual >= 0).all()
            assert (case.residual.sum(dim=-1) > 0).all()
            torch.testing.assert_close(case.emitted.double(), expected, **within)
            lacking = (case.q - expected).clamp_min(0).sum(dim=-1)
            torch.testing.assert_close(case.rejection.double(), lacking, **within)
            reported = case.reported_rejection.double()
            torch.testing.assert_close(reported, lacking[:, None].expand_as(case.q), **within)


@pytest.mark.parametrize("strategy", CASCADES, ids=lambda s: s.label)
def test_a_cascade_rejects_with_the_total_variation_where_it_defers(strategy: Strategy) -> None:
    """Lemma 3: the rejection probability is r D_TV(p, q)."""
    for case, _ in itertools.chain(*(cases(strategy, s, torch.float64) for s in SAMPLINGS)):
        assert torch.equal(case.deferred, case.deferred[:, :1].expand_as(case.deferred))
        variation = (case.p - case.q).abs().sum(dim=-1) / 2
        expected = case.deferred[:, 0] * variation
        torch.testing.assert_close(case.rejection, expected, atol=1e-12, rtol=0)


@all_strategies
def test_deferrals_are_those_of_the_paper(strategy: Strategy) -> None:
    for vocabulary, sampling in itertools.product((2, 6), SAMPLINGS):
        q_logits, p_logits = logits(vocabulary, 80, torch.float64, seed=1)
        case = Case(strategy, q_logits, p_logits, sampling)
        for row, (q, p) in enumerate(zip(q_logits.numpy(), p_logits.numpy(), strict=True)):
            at = reference.At.of(q, p, Setting(1, 1, sampling))
            expected = reference.defers(strategy, at)
            assert case.deferred[row].tolist() == expected.tolist()


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.9])
def test_lossy_emits_the_closed_form_with_the_deficit_spread_by_the_residual(alpha: float) -> None:
    """Lemma 2's max(min(q, p/(1-alpha)), p/beta) sums to more than one at beta = 1, except for alpha 0.

    So the law follows from acceptance min(1, p / ((1 - alpha) q)) and residual max(0, p - q) alone.
    """
    for case, _ in cases(strategy("lossy_spec_decode", alpha), Sampling(1.0), torch.float64):
        accepted = torch.minimum(case.q, case.p / (1 - alpha))
        gained = (case.p - case.q).clamp_min(0)
        shares = gained / gained.sum(dim=-1, keepdim=True)
        expected = accepted + (1 - accepted.sum(dim=-1, keepdim=True)) * shares
        torch.testing.assert_close(case.emitted, expected, atol=1e-12, rtol=0)
        closed = torch.maximum(accepted, case.p)
        assert (closed.sum(dim=-1) > 1 - 1e-12).all()
        if alpha > 0:
            assert (closed.sum(dim=-1) > 1.01).any()


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.9])
def test_the_tuned_beta_makes_the_closed_form_a_distribution(alpha: float) -> None:
    """Lemma 2 with its own beta: the same rejections as with beta = 1, spread otherwise."""
    tuned = sweep("lossy_spec_decode", {"alpha": alpha, "beta": "tuned"})[0]
    both = zip(
        cases(tuned, FULL, torch.float64),
        cases(strategy("lossy_spec_decode", alpha), FULL, torch.float64),
        strict=True,
    )
    for (case, _), (plain, _) in both:
        # From the residual p / beta - q of a token that gains, its beta.
        gains = (case.residual > 1e-9) & (case.rejection > 1e-9)[:, None]
        betas = (case.p / (case.residual + case.q))[gains]
        assert (betas >= 1 - 1e-9).all()
        beta = (case.p / (case.residual + case.q)).masked_fill(~gains, torch.nan).nanmean(-1)
        closed = torch.minimum(case.q, case.p / (1 - alpha)).maximum(case.p / beta[:, None])
        known = ~beta.isnan()
        assert known.any()
        torch.testing.assert_close(case.emitted[known], closed[known], atol=1e-6, rtol=0)
        torch.testing.assert_close(case.rejection, plain.rejection)


ENDS = [
    ("token_cascade.chow", 0.0, "verifier"),
    ("token_cascade.chow", 1.0, "drafter"),
    ("token_cascade.entropy", 0.0, "verifier"),
    ("token_cascade.entropy", LOG_6, "drafter"),
    ("oracle_cascade.diff", -1.0, "verifier"),
    ("oracle_cascade.diff", 1.0, "drafter"),
    ("oracle_cascade.diff_log", -LOG_6, "verifier"),
    ("oracle_cascade.diff_log", LOG_6, "drafter"),
    ("lossy_spec_decode", 0.0, "verifier"),
    ("bild_star", 0.0, "verifier"),
    ("bild_star", 100.0, "drafter"),
    ("spec_cascade.chow", 0.0, "verifier"),
    ("spec_cascade.chow", 1.0, "drafter"),
    ("spec_cascade.diff", -1.0, "verifier"),
    ("spec_cascade.diff", 1.0, "drafter"),
    ("spec_cascade.opt", -1e9, "verifier"),
    ("spec_cascade.chow_log", 0.0, "verifier"),
    ("spec_cascade.chow_log", LOG_6, "drafter"),
    ("spec_cascade.diff_log", -LOG_6, "verifier"),
    ("spec_cascade.diff_log", LOG_6, "drafter"),
    ("spec_cascade.opt_log", -1e9, "verifier"),
    ("spec_cascade.opt_log", 1e9, "drafter"),
    ("spec_cascade.token_v1", -1.0, "verifier"),
    ("spec_cascade.token_v1", 1.0, "drafter"),
    ("spec_cascade.token_v2", -1.0, "verifier"),
    ("spec_cascade.token_v2", 1.0, "drafter"),
    ("spec_cascade.token_v3", -1e-3, "verifier"),
    ("spec_cascade.token_v3", 1.0, "drafter"),
]


@pytest.mark.parametrize(("use", "alpha", "model"), ENDS)
def test_ends_of_the_range_of_alpha_give_one_model(use: str, alpha: float, model: str) -> None:
    end = strategy(use, alpha)
    for case, _ in itertools.chain(*(cases(end, s, torch.float64) for s in SAMPLINGS)):
        expected = case.q if model == "drafter" else case.p
        torch.testing.assert_close(case.dense, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("vocabulary", [2, 3, 5, 50])
def test_opt_at_one_gives_the_drafter_at_temperature_one(vocabulary: int) -> None:
    """The gap of the maxima never exceeds the total variation, and rounding must not break the ties.

    The gap *is* the variation wherever the verifier is surer of one token and of no other.
    """
    for dtype in (torch.float32, torch.float64):
        q_logits, p_logits = logits(vocabulary, 500, dtype)
        surer = q_logits + 3 * torch.nn.functional.one_hot(q_logits.argmax(-1), vocabulary)
        for alpha in (1.0, 1.5):
            for verifier in (p_logits, surer):
                assert not _case("spec_cascade.opt", q_logits, verifier, alpha).deferred.any()


def test_diff_and_opt_at_zero_take_the_more_confident_model() -> None:
    for use in ("spec_cascade.diff", "spec_cascade.opt"):
        for case, _ in cases(strategy(use, 0.0), Sampling(1.0), torch.float64):
            drafter_leads = case.q.amax(-1, keepdim=True) >= case.p.amax(-1, keepdim=True)
            assert torch.equal(case.dense, torch.where(drafter_leads, case.q, case.p))


def test_chow_at_zero_keeps_a_drafter_that_is_certain() -> None:
    certain = torch.tensor([[0.0, 200.0]])
    case = _case("spec_cascade.chow", certain, torch.zeros(1, 2), alpha=0.0)
    assert torch.equal(case.dense, case.q)


def test_token_v3_at_zero_is_sharper_than_the_verifier_unless_greedy() -> None:
    strictest = strategy("spec_cascade.token_v3", 0.0)
    for case, _ in cases(strictest, Sampling(1.0), torch.float64):
        mode = case.p.argmax(dim=-1, keepdim=True)
        assert (case.dense.gather(1, mode) >= case.p.gather(1, mode) - 1e-12).all()
        assert ((case.dense - case.p).abs().sum(dim=-1) > 0.05).any()
    for case, _ in cases(strictest, Sampling(0.0), torch.float64):
        assert torch.equal(case.dense, case.p)


def test_opt_and_diff_emit_the_same_tokens_at_temperature_zero() -> None:
    for alpha in (-1.0, -0.4, 0.0, 0.2, 0.6, 1.0):
        laws = [
            [case.dense for case, _ in cases(strategy(use, alpha), Sampling(0.0), torch.float64)]
            for use in ("spec_cascade.diff", "spec_cascade.opt")
        ]
        for diff, opt in zip(*laws, strict=True):
            assert torch.equal(diff, opt)


@pytest.mark.parametrize(
    "use", sorted({s.use for s in [*CASCADES, *TOKEN_RULES]} - {"spec_decode"})
)
def test_a_larger_alpha_never_defers_more(use: str) -> None:
    q_logits, p_logits = logits(5, 200, torch.float64, seed=2)
    before = torch.ones(200, 5, dtype=torch.bool)
    shares = []
    for alpha in (-1.0, 0.0, 0.2, 0.5, 1.0, 2.0):
        deferred = _case(use, q_logits, p_logits, alpha).deferred
        assert not (deferred & ~before).any()
        before = deferred
        shares.append(deferred.double().mean().item())
    assert shares[0] > shares[2] > shares[-1]


@speculative
def test_equal_models_never_reject(strategy: Strategy) -> None:
    """Not so a token rule: its target is sharper than either model (tested below)."""
    for dtype, sampling in itertools.product(TOLERANCE, SAMPLINGS):
        both = logits(5, 60, dtype)[0]
        case = Case(strategy, both, both, sampling)
        judged = case.q > 0
        if strategy in TOKEN_RULES:
            judged &= ~case.deferred
        tolerance = 1e-6 if strategy.use == "custom" else 0  # the mixture itself rounds
        assert (case.acceptance >= 1 - tolerance)[judged].all()
        if strategy.use != "custom":
            # The engine's own test with the largest uniform there is.
            assert ((1 - 2.0**-53) * case.q.double() < case.mass.double())[judged].all()


@pytest.mark.parametrize("rule", TOKEN_RULES, ids=lambda s: s.label)
@any_sampling
def test_a_token_rule_rejects_deferred_mass_even_between_equal_models(
    rule: Strategy, sampling: Sampling
) -> None:
    both = logits(5, 60, torch.float64)[0]
    case = Case(rule, both, both, sampling)
    eta = (case.q * case.deferred).sum(dim=-1)
    torch.testing.assert_close(case.rejection, eta * (1 - eta), atol=1e-12, rtol=0)


@speculative
def test_a_residual_without_mass_is_replaced_by_the_target(strategy: Strategy) -> None:
    both = logits(4, 40, torch.float32)[0]
    case = Case(strategy, both, both, FULL)
    vanished = (case.dense - case.q).amax(dim=-1) < 1e-7
    assert vanished.any() or (strategy in TOKEN_RULES and 0 <= (strategy.alpha or 0.0) < 1)
    assert (case.residual.sum(dim=-1) > 0).all()
    # Some rounding may be left of a residual; otherwise it is the target, and here that is p.
    whole = vanished & ((case.residual - case.p).abs().amax(dim=-1) < 1e-6)
    assert whole.any() or not vanished.any()


# --- the cases that other systems got wrong ---------------------------------------------------------


def _case(
    use: str,
    q_logits: Tensor,
    p_logits: Tensor,
    alpha: float | None = None,
    drafting: Sampling = FULL,
    verifying: Sampling = FULL,
) -> Case:
    return Case(strategy(use, alpha), q_logits, p_logits, drafting, verifying)


def _given(q: list[float], p: list[float], **samplings: Sampling) -> Case:
    """Plain speculative decoding for one position, from probabilities."""
    q_logits, p_logits = (torch.tensor([row], dtype=torch.float64).log() for row in (q, p))
    return _case("spec_decode", q_logits, p_logits, **samplings)


def _law_when_drawn_from(proposal: Tensor, case: Case) -> Tensor:
    """The emitted law when tokens come from another distribution than the q they are judged by."""
    rejected = (proposal * (1 - case.acceptance)).sum()
    return proposal * case.acceptance[0] + rejected * case.residual[0] / case.residual.sum()


def _assert_law(law: Tensor, expected: list[float], tolerance: float = 1e-9) -> None:
    assert law.flatten().tolist() == pytest.approx(expected, abs=tolerance)


def test_a_greedy_drafter_is_judged_as_greedy() -> None:
    q, p = [0.8, 0.2], [0.6, 0.4]
    greedy = _given(q, p, drafting=Sampling(0.0))
    assert greedy.q.tolist() == [[1.0, 0.0]]
    _assert_law(greedy.emitted, p)
    fault = _law_when_drawn_from(greedy.q[0], _given(q, p))
    _assert_law(fault, [0.75, 0.25])


def test_the_judged_distribution_is_the_truncated_one_that_was_drawn_from() -> None:
    q, p = [0.4, 0.3, 0.1, 0.1, 0.1], [0.3, 0.3, 0.2, 0.1, 0.1]
    truncated = _given(q, p, drafting=Sampling(1.0, top_k=2))
    assert truncated.q[0].tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0, 0])
    _assert_law(truncated.emitted, p)
    fault = _law_when_drawn_from(truncated.q[0], _given(q, p))
    _assert_law(fault, [3 / 7, 3 / 7, 1 / 7, 0, 0])


def test_the_residual_is_divided_by_its_sum_and_never_exponentiated() -> None:
    case = _given([0.9, 0.1, 0.0], [0.5, 0.5, 0.0])
    residual = case.residual[0] / case.residual[0].sum()
    _assert_law(residual, [0, 1, 0])
    assert residual[0] == residual[2] == 0
    _assert_law(torch.softmax(case.residual[0], dim=0), [0.29, 0.43, 0.29], tolerance=0.01)


def test_acceptance_uses_the_drafters_probabilities() -> None:
    equal = _given([0.5, 0.5], [0.5, 0.5])
    assert equal.rejection.item() == 0
    as_if_certain = (equal.q * equal.p).sum()
    assert as_if_certain.item() == pytest.approx(0.5)
    case = _given([0.2, 0.5, 0.3], [0.6, 0.3, 0.1])
    assert 1 - case.rejection.item() == pytest.approx(0.6)


def test_each_model_has_its_own_temperature() -> None:
    q_logits, p_logits = logits(5, 30, torch.float64, seed=3)
    case = _case("spec_decode", q_logits, p_logits, drafting=Sampling(1.5), verifying=Sampling(0.7))
    torch.testing.assert_close(case.q, torch.softmax(q_logits / 1.5, dim=-1))
    torch.testing.assert_close(case.emitted, torch.softmax(p_logits / 0.7, dim=-1))


# max q = 0.45 and 0.8 against max p = 0.6, each with its other tokens; alpha, and whether it defers.
GOLDEN = [
    ("spec_cascade.chow", 0.5, [True, False]),
    ("spec_cascade.chow", 0.6, [False, False]),
    ("token_cascade.chow", 0.5, [True, False]),
    ("spec_cascade.diff", 0.1, [True, False]),
    ("spec_cascade.diff", 0.2, [False, False]),
    ("spec_cascade.diff", -0.3, [True, True]),
]


@pytest.mark.parametrize(("use", "alpha", "expected"), GOLDEN)
@any_sampling
def test_rules_read_untempered_maxima_at_every_temperature(
    use: str, alpha: float, expected: list[bool], sampling: Sampling
) -> None:
    q_logits = torch.tensor([[0.45, 0.3, 0.25], [0.8, 0.1, 0.1]], dtype=torch.float64).log()
    p_logits = torch.tensor([[0.3, 0.6, 0.1], [0.3, 0.6, 0.1]], dtype=torch.float64).log()
    case = _case(use, q_logits, p_logits, alpha, sampling, sampling)
    assert case.deferred[:, 0].tolist() == expected


def test_opt_reads_untempered_maxima_and_the_variation_of_what_is_drawn() -> None:
    q, p = [0.45, 0.3, 0.25], [0.3, 0.6, 0.1]  # gap of the maxima 0.15
    q_logits, p_logits = (torch.tensor([row], dtype=torch.float64).log() for row in (q, p))
    # At T = 0, 0.5, 1 the variation is 1, 0.5291, 0.3: the rule turns at alpha 0.15, 0.2835, 0.5.
    for temperature, turn in ((0.0, 0.15), (0.5, 0.2835), (1.0, 0.5)):
        sampling = Sampling(temperature)
        for alpha, deferred in ((turn - 1e-3, True), (turn + 1e-3, False)):
            case = _case("spec_cascade.opt", q_logits, p_logits, alpha, sampling, sampling)
            assert case.deferred[0, 0].item() is deferred, (temperature, alpha)


@any_sampling
def test_token_v3_reads_untempered_probabilities_at_every_temperature(sampling: Sampling) -> None:
    p_logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    q_logits = torch.zeros(1, 3, dtype=torch.float64)
    for alpha, deferred in ((0.3, [False, True, True]), (0.5, [False, False, True])):
        case = _case("spec_cascade.token_v3", q_logits, p_logits, alpha, sampling, sampling)
        assert case.deferred[0].tolist() == deferred


def test_tempered_maxima_would_decide_otherwise() -> None:
    """The planted fault of the golden table: read at T = 0.5, max q = 0.45 is 0.57 and Chow keeps it."""
    q_logits = torch.tensor([0.45, 0.3, 0.25], dtype=torch.float64).log()
    assert confidence(q_logits).max() < 1 - 0.5 < confidence(q_logits / 0.5).max()


def test_the_reference_knows_every_strategy_of_the_table() -> None:
    at = reference.At.of(np.zeros(3), np.zeros(3), Setting(1, 1))
    for known in STRATEGIES:
        assert reference.target(known, at).sum() == pytest.approx(1), known
    assert {known.use for known in EVERY} == set(KINDS)
