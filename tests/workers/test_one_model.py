"""A run whose strategies need one model asks that one alone, and its rows are those in company.

Planted faults these tests catch: a verifier that draws with another role, or the drafter's sampling,
when it writes by itself (its judging then puts the tokens right, one a round); a token fed where it
does not stand; a text that goes on behind its end; a block longer than the budget; a broken model's
token that is kept, or the other model's error; a drafter's full context taken for an error of a
verifier that needs none; the idle model opened or asked all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pipeline.models.interface import LanguageModel
from pipeline.models.toy import TableModel
from pipeline.records import Bonus, Outcome, Sampling, Setting, Strategy
from pipeline.workers.wire import VerifyReply, VerifyRequest
from tests.loop import decode, drive, workers
from tests.models.test_slots import bitwise
from tests.tiny import CAUSAL, EOS, SEQ2SEQ, slot_model
from tests.workers.test_stopping import BROKEN_AT, PROMPTS, Breaking, bad_values, random_table

MODELS = ("drafter", "verifier")
COMPANY = [
    *(Strategy(use) for use in (*MODELS, "spec_decode")),
    Strategy("token_cascade.chow", 0.5),
    Strategy("oracle_cascade.diff", 0.1),
    Strategy("spec_cascade.token_v3", 0.3),
]
SAMPLINGS = [Sampling(0.0), Sampling(1.0), Sampling(0.7, top_k=9, top_p=0.9)]

one_model = pytest.mark.parametrize("use", MODELS)
every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "full", "truncated"])


def assert_alone_as_in_company(
    pair: Sequence[LanguageModel], prompts: Sequence[Sequence[int]], setting: Setting
) -> dict[tuple[str, str], Outcome]:
    """The outcomes of each model by (use, example), checked against a run of several kinds."""
    together = decode(*pair, prompts, COMPANY, setting, slots=16)
    found = {}
    for use in MODELS:
        alone = decode(*pair, prompts, [Strategy(use)], setting, slots=3, banks=2)
        assert len(alone) == len(prompts) * setting.repeats
        for key, outcome in alone.items():
            assert determined(outcome) == determined(together[key])
            found[use, key[0]] = outcome
    return found


def determined(outcome: Outcome) -> Outcome:
    return replace(outcome, wall_seconds=0.0)


@every_sampling
@pytest.mark.parametrize("bonus", ["verifier", "target"])
@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_a_tables_rows_are_those_in_company(
    sampling: Sampling, bonus: Bonus, block_size: int
) -> None:
    """Texts that end themselves, and others at limits within and behind the end of a block."""
    pair = [TableModel(random_table(9, seed)) for seed in (1, 2)]
    ends = set()
    for budget in (block_size, 3 * block_size + 1):
        setting = Setting(
            block_size, budget, sampling, bonus=bonus, seed=3, repeats=2, eos_token_ids=(4, 7)
        )
        outcomes = assert_alone_as_in_company(pair, [[0], [2], [3], [8]], setting)
        ends |= {outcome.finish_reason for outcome in outcomes.values()}
    assert ends == {"stop", "length"}


def test_each_model_keeps_its_own_sampling() -> None:
    pair = [TableModel(random_table(9, seed)) for seed in (1, 2)]
    setting = Setting(3, 10, Sampling(0.8), Sampling(1.4, top_k=3), seed=2, eos_token_ids=(4,))
    assert_alone_as_in_company(pair, [[token] for token in range(9)], setting)


@bitwise
@every_sampling
@pytest.mark.parametrize("name", [CAUSAL[0], CAUSAL[1], SEQ2SEQ[0]])
def test_a_real_models_rows_are_those_in_company(name: str, sampling: Sampling) -> None:
    pair = slot_model(name, 2), slot_model(name, 1)
    prompts = [[3 + (7 * i) % 50 for i in range(length)] for length in (1, 4, 9, 17, 30)]
    setting = Setting(3, 12, sampling, seed=5, eos_token_ids=(EOS,))
    assert_alone_as_in_company(pair, prompts, setting)


@one_model
@pytest.mark.parametrize("name", [CAUSAL[0], SEQ2SEQ[0]])
def test_the_other_model_is_never_asked(name: str, use: str) -> None:
    pair = {"drafter": slot_model(name, 2), "verifier": slot_model(name, 1)}
    prompts = [[3, 4, 5], [6] * 9]
    drafting, verifying = workers(*pair.values(), prompts, [Strategy(use)], Setting(3, 9))
    requests: list[VerifyRequest] = []

    def verify(request: VerifyRequest) -> VerifyReply:
        requests.append(request)
        return verifying.verify(request)

    outcomes = drive(drafting, verify)
    assert len(outcomes) == len(prompts)
    assert bool(requests) == (use == "verifier")
    assert all(request.nbytes < 1000 for request in requests), "something was drafted"
    for role, model in pair.items():
        effort = model.effort
        assert (effort.stepped > 0) == (role == use), role
        assert (effort.prefilled + effort.reused > 0) == (role == use), role


def test_a_verifier_alone_writes_whole_blocks_in_a_round() -> None:
    table = TableModel(random_table(9, 1))
    verifier, setting = [Strategy("verifier")], Setting(4, 12, Sampling(0.9), Sampling(2.0, 3))
    drafting, verifying = workers(table, table, [[1], [2], [3]], verifier, setting)
    rounds = 0

    def verify(request: VerifyRequest) -> VerifyReply:
        nonlocal rounds
        rounds += 1
        return verifying.verify(request)

    for outcome in drive(drafting, verify).values():
        assert len(outcome.output_ids) == outcome.counts.verifier_calls == 12
    assert rounds == 3


@bad_values
@one_model
@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "sampled"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
def test_a_broken_model_ends_its_own_text_with_its_own_error(
    use: str, bad: float, sampling: Sampling, block_size: int
) -> None:
    """Block 3 breaks at the first token of a block, the others within one."""
    pair: list[LanguageModel] = [TableModel(random_table(6, seed)) for seed in (1, 2)]
    pair[MODELS.index(use)] = Breaking(pair[MODELS.index(use)], bad)
    setting = Setting(block_size, 8, sampling, bonus="target", seed=3)
    outcomes = assert_alone_as_in_company(pair, PROMPTS, setting)
    for (strategy, example), outcome in outcomes.items():
        broken = strategy == use and example == "1"
        code = None if outcome.error is None else outcome.error.code
        assert code == (f"{use}_nan" if broken else None)
        assert len(outcome.output_ids) == (BROKEN_AT if broken else 8)


@one_model
@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "sampled"])
def test_nan_from_the_other_model_does_not_matter(use: str, sampling: Sampling) -> None:
    pair: list[LanguageModel] = [TableModel(random_table(6, seed)) for seed in (1, 2)]
    clean = decode(*pair, PROMPTS, [Strategy(use)], Setting(3, 8, sampling))
    pair[1 - MODELS.index(use)] = TableModel(torch.full((6, 6), torch.nan))
    broken = decode(*pair, PROMPTS, [Strategy(use)], Setting(3, 8, sampling))
    for key, outcome in broken.items():
        assert determined(outcome) == determined(clean[key])
        assert outcome.error is None


@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_the_drafters_context_ends_the_drafters_text_alone(block_size: int) -> None:
    pair = TableModel(random_table(9, 1), context=12), TableModel(random_table(9, 2))
    prompts = [[3], [4, 5, 6, 7], [8] * 11, [2] * 30]
    setting = Setting(block_size, 20, Sampling(0.0))
    outcomes = assert_alone_as_in_company(pair, prompts, setting)
    for (use, example), outcome in outcomes.items():
        room = max(0, 13 - len(prompts[int(example)]))
        assert len(outcome.output_ids) == (room if use == "drafter" else 20)
        code = None if outcome.error is None else outcome.error.code
        assert code == ("drafter_context" if use == "drafter" else None)
