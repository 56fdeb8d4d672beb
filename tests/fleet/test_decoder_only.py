"""A decoder-only pair through the whole path, from local folders: prompts, rows, and `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from pipeline.config import parse_job
from pipeline.results.writer import read_rows
from pipeline.run import prepare, run
from tests.fleet.test_same_rows import Silent
from tests.tiny import VOCABULARY, hf_model

WORDS = ["<pad>", "</s>", "<s>", *(f"w{number}" for number in range(VOCABULARY - 3))]
TEMPLATE = "{% for m in messages %}<s> {{ m['content'] }}{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, with a start token that a chat template writes too."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    return fast


def pair(folder: Path, name: str) -> dict[str, Any]:
    """Save a tiny drafter and a tiny verifier of one architecture."""
    for role, seed in (("drafter", 2), ("verifier", 1)):
        hf_model(name, seed).save_pretrained(folder / role)
        tokenizer().save_pretrained(folder / role)
    return {role: {"path": str(folder / role)} for role in ("drafter", "verifier")}


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize(
    "asked", [{"prompt": "{text}"}, {"messages": [{"role": "user", "content": "{text}"}]}]
)
def test_greedy_rows_are_what_generate_writes(
    name: str, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["w1", "w2 w3 w4", " ".join(f"w{i}" for i in range(20))]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    job = parse_job(
        {
            "name": "causal",
            "output": str(tmp_path / "run"),
            "dataset": {"path": "json", "data_files": str(data), **asked},
            "models": pair(tmp_path, name),
            "decoding": {"block_size": 3, "temperature": 0, "max_new_tokens": 16},
            "strategies": ["verifier", "spec_decode", {"use": "spec_cascade.opt", "alpha": 0.3}],
            "fleet": "local",
        }
    )
    run(prepare(job), Silent())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "verifier").eval()
    rows = read_rows(tmp_path / "run").to_pylist()
    assert len(rows) == 9
    for row in rows:
        assert row["error"] is None
        assert row["prompt_ids"].count(2) == 1, "one start token"
        if row["strategy"].startswith("spec_cascade"):
            continue
        ids = torch.tensor([row["prompt_ids"]])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16
        )[0, ids.shape[1] :].tolist()
        assert row["output_ids"] == expected
