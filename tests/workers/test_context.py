"""A drafter whose context ends before the verifier's leaves the rest of the text to the verifier."""

from __future__ import annotations

import pytest
import torch

from pipeline.models.toy import TableModel
from pipeline.records import Sampling, Setting, Strategy
from tests.loop import decode
from tests.tiny import EOS, hf_model, slot_model

STRATEGIES = [
    Strategy("verifier"),
    Strategy("spec_decode"),
    Strategy("spec_cascade.opt", alpha=0.3),
    Strategy("token_cascade.chow", alpha=0.3),
    Strategy("oracle_cascade.diff", alpha=0.1),
    Strategy("drafter"),
]
PROMPTS = [[3], [4, 5, 6, 7], [8] * 11, [9] * 30]


def tables(context: int | None) -> tuple[TableModel, TableModel]:
    generator = torch.Generator().manual_seed(3)
    drafter, verifier = (torch.randn(20, 20, generator=generator) for _ in range(2))
    verifier[:, EOS] = drafter[:, EOS] = -9  # long texts
    return TableModel(drafter, context), TableModel(verifier)


@pytest.mark.parametrize("bonus", ["verifier", "target"])
@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_the_text_goes_on_without_the_drafter(block_size: int, bonus: str) -> None:
    setting = Setting(block_size, 20, Sampling(0.0), bonus=bonus, eos_token_ids=(EOS,))
    short = decode(*tables(12), PROMPTS, STRATEGIES, setting)
    free = decode(*tables(None), PROMPTS, STRATEGIES, setting)
    for (example, repeat, label), outcome in short.items():
        room = max(0, 13 - len(PROMPTS[int(example)]))
        alike = free[example, repeat, label].output_ids
        if label == "drafter":
            assert outcome.error is not None
            assert outcome.error.code == "drafter_context"
            assert outcome.output_ids == alike[:room]
            continue
        assert outcome.error is None
        assert len(outcome.output_ids) == 20
        assert outcome.output_ids[:room] == alike[:room]
        if label in {"spec_decode", "verifier"}:
            assert outcome.output_ids == alike
        verifier = free[example, repeat, "verifier"].output_ids
        if room == 0:
            assert outcome.output_ids == verifier
            assert outcome.counts.verifier_calls == 20
            assert outcome.counts.drafter_calls == 0


def test_learned_positions_run_out_without_harm() -> None:
    setting = Setting(4, 24, Sampling(0.0), eos_token_ids=(EOS,))
    prompts = [[5] * 3, [6] * 20, [7, 8, 9] * 12]
    drafter, verifier = slot_model("gpt2", seed=2, positions=32), slot_model("gpt2", seed=1)
    outcomes = decode(drafter, verifier, prompts, [Strategy("spec_decode")], setting)
    for index, prompt in enumerate(prompts):
        model = hf_model("gpt2", seed=1)
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
        )[0, len(prompt) :].tolist()
        assert list(outcomes[str(index), 0, "spec_decode"].output_ids) == expected
