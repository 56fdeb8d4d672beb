"""Sizes from configs alone against models and banks that are really there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from torch import Tensor

from pipeline.config import ModelConfig
from pipeline.models.caching import CachedBank
from pipeline.models.loading import load_model
from pipeline.models.seq2seq import Seq2SeqBank
from pipeline.models.sizes import model_size
from pipeline.planning.memory import Load, memory_of
from pipeline.records import Setting, Strategy
from pipeline.workers.drafter import DrafterWorker
from pipeline.workers.verifier import VerifierWorker
from tests.loop import drive, workers
from tests.tiny import CAUSAL, SEQ2SEQ, hf_model

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "jobs" / "demo"
Dtype = Literal["auto", "float32", "float16", "bfloat16"]


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("role", ["drafter", "verifier"])
def test_weights_are_as_large_as_loaded(role: str, dtype: Dtype) -> None:
    given = ModelConfig(path=str(DEMO / role), dtype=dtype)
    loaded: Any = load_model(given, vocabulary=4096)
    size = model_size(given)
    weights = list(loaded.model.parameters())
    assert size.weight_bytes == sum(weight.nbytes for weight in weights)
    assert size.parameters == sum(weight.numel() for weight in weights)
    assert f"torch.{size.dtype}" == str(loaded.model.dtype)


@pytest.mark.parametrize("name", [*CAUSAL, *SEQ2SEQ])
@pytest.mark.parametrize(("written", "block"), [(20, 4), (45, 3)])
def test_caches_are_as_large_as_in_real_banks(
    name: str, written: int, block: int, tmp_path: Path
) -> None:
    hf_model(name).save_pretrained(tmp_path)
    given = ModelConfig(path=str(tmp_path), dtype="float32")
    drafting, verifying = run_to_the_end(given, PROMPTS, written, block, vocabulary=61)
    expected = expected_caches(given, max(map(len, PROMPTS)), written, block)
    assert cache_bytes(drafting.banks[0].cache) == expected
    assert [cache_bytes(bank.cache) for bank in verifying._banks.values()] == [expected]


@pytest.mark.parametrize("role", ["drafter", "verifier"])
def test_caches_of_the_demo_pair_are_exact(role: str) -> None:
    given = ModelConfig(path=str(DEMO / role), dtype="bfloat16")
    drafting, _ = run_to_the_end(given, PROMPTS, 48, 4, vocabulary=4096)
    assert cache_bytes(drafting.banks[0].cache) == expected_caches(given, 21, 48, 4)


@pytest.mark.parametrize("written", [27, 28, 29, 30, 31, 32])
def test_caches_are_never_larger_than_said(written: int, tmp_path: Path) -> None:
    hf_model("t5_relu").save_pretrained(tmp_path)
    given = ModelConfig(path=str(tmp_path), dtype="float32")
    drafting, verifying = run_to_the_end(given, PROMPTS, written, 4, vocabulary=61)
    said = expected_caches(given, 21, written, 4)
    assert cache_bytes(drafting.banks[0].cache) <= said
    assert all(cache_bytes(bank.cache) <= said for bank in verifying._banks.values())


def test_columns_reach_behind_the_last_token(tmp_path: Path) -> None:
    """A lane at its last token is still given a whole block while others have more to write."""
    for seed in (0, 1):
        hf_model("t5_relu", seed).save_pretrained(tmp_path / str(seed))
    drafter, verifier = (ModelConfig(path=str(tmp_path / str(n)), dtype="float32") for n in (0, 1))
    _, verifying = run_to_the_end(drafter, PROMPTS * 8, 30, 4, vocabulary=61, verifier=verifier)
    said = expected_caches(verifier, 21, 30, 4)
    assert [cache_bytes(bank.cache) for bank in verifying._banks.values()] == [said]


def test_a_context_ends_the_columns(tmp_path: Path) -> None:
    hf_model("llama", positions=64).save_pretrained(tmp_path)
    size = model_size(ModelConfig(path=str(tmp_path)))
    assert (size.columns(50, 100, 4), size.columns(10, 20, 4)) == (64, 64 - 32 + 32)
    assert size.columns(5, 20, 4) == 32


def test_grouped_heads_are_cached_once(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    size = model_size(ModelConfig(path=str(tmp_path)))
    assert (size.heads, size.key_heads, size.head_size, size.layers) == (4, 2, 8, 2)


def test_a_worker_holds_weights_banks_and_a_pass() -> None:
    size = model_size(ModelConfig(path=str(DEMO / "verifier"), dtype="float32"))
    load = Load(banks=3, slots=32, block=4, prompt=30, written=48, vocabulary=4096)
    memory = memory_of("verifier", size, load)
    assert memory.weights == 22_035_456
    assert memory.caches == 3 * size.bank_bytes(32, size.columns(30, 48, 4), 30)
    assert memory.passes == 12 * 32 * 5 * 4096 * 4
    assert memory.total == memory.weights + memory.caches + memory.passes
    idle = Load(banks=0, slots=32, block=4, prompt=30, written=48, vocabulary=4096)
    assert memory_of("verifier", size, idle).caches == 0


SLOTS = 6
PROMPTS = [[5, 7, 9] * 7, [3, 4], [11] * 9, [8, 8, 8], [6, 5, 4, 3], [9, 10], [12, 13, 14]]


def run_to_the_end(
    given: ModelConfig,
    prompts: list[list[int]],
    written: int,
    block: int,
    vocabulary: int,
    verifier: ModelConfig | None = None,
) -> tuple[DrafterWorker, VerifierWorker]:
    """By default a model is its own verifier. No id ends a text, so all are as long as allowed."""
    models = [load_model(one, vocabulary) for one in (given, verifier or given)]
    setting = Setting(block_size=block, max_new_tokens=written)
    drafting, verifying = workers(
        models[0], models[1], prompts, [Strategy("spec_decode")], setting, slots=SLOTS
    )
    drive(drafting, verifying.verify)
    return drafting, verifying


def expected_caches(given: ModelConfig, prompt: int, written: int, block: int) -> int:
    size = model_size(given)
    return size.bank_bytes(SLOTS, size.columns(prompt, written, block), prompt)


def cache_bytes(bank: Any) -> int:
    """Bytes of all tensors that a bank keeps between rounds, but for two tokens a slot."""
    assert isinstance(bank, CachedBank)
    tensors: list[Tensor] = [bank._held]
    for layer in bank._cache.layers:
        tensors += [layer.keys, layer.values]
    if isinstance(bank, Seq2SeqBank):
        tensors.append(bank._cross_mask)
        for cross in bank._cross:
            tensors += [cross._all_keys, cross._all_values]
    return sum(tensor.nbytes for tensor in tensors)
