"""What is loaded is what was saved, where it was asked for."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config import JobError, ModelConfig
from pipeline.models import loading
from pipeline.models.loading import load_model

SAVED = Path(__file__).parents[2] / "jobs" / "g2p" / "drafter"


def test_no_weight_is_drawn_at_random(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SAVED, folder)
    weights = load_file(folder / "model.safetensors")
    lacking = next(name for name in weights if "SelfAttention.k" in name)
    del weights[lacking]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=lacking):
        load_model(ModelConfig(path=str(folder)), 90)
    assert load_model(ModelConfig(path=str(SAVED)), 90).vocabulary == 90


@pytest.mark.parametrize(
    ("num_gpus", "there", "device", "dealt"),
    [
        (4, 4, "auto", True),
        (
            4,
            1,
            "auto",
            False,
        ),  # on a machine without them, as on a cluster that only says it has some
        (1, 4, "auto", False),
        (0.5, 4, "auto", False),
        (4, 4, "cpu", False),
    ],
)
def test_layers_are_dealt_to_several_gpus(
    monkeypatch: pytest.MonkeyPatch, num_gpus: float, there: int, device: str, dealt: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(loading, "find_spec", lambda name: name == "accelerate")
    asked: dict[str, Any] = {}

    class Model:
        def to(self, where: str) -> Model:
            asked["to"] = where
            return self

    def from_pretrained(path: str, **given: Any) -> tuple[Model, dict[str, Any]]:
        asked.update(given)
        return Model(), {"missing_keys": set()}

    fake = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setattr(loading, "AutoModelForSeq2SeqLM", fake)
    monkeypatch.setattr(loading, "Seq2SeqModel", lambda model, vocabulary: model)
    load_model(ModelConfig(path=str(SAVED), device=device), 90, num_gpus)
    assert asked["device_map"] == ("auto" if dealt else None)
    assert ("to" in asked) != dealt, "a model that was dealt must not be gathered again"


def test_several_gpus_without_accelerate_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(loading, "find_spec", lambda _: None)
    with pytest.raises(JobError, match=r"^2 GPUs .*accelerate.*'\.\[gpu\]'"):
        load_model(ModelConfig(path=str(SAVED)), 90, 2)
