"""Whether two models can work as a pair: checked from configs and tokenizers, before any weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from pipeline.config import JobError, ModelConfig, ModelsConfig, all_of, near_path
from pipeline.models.loading import load_config, load_tokenizer

_WEIGHTS = "model.safetensors"
_TOKENIZERS = ("tokenizer*", "*.model", "vocab.*")
"""The files one of which a saved tokenizer has."""


@dataclass(frozen=True)
class Pairing:
    """What the pair shares.

    `vocabulary` is the number of ids both models and the tokenizer know; logits are cut to it.
    `context` is the longest sequence (prompt and output) the verifier can hold, None if unlimited; a
    drafter with a shorter one leaves the rest of a text to the verifier.
    """

    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    eos_token_ids: tuple[int, ...]
    context: int | None
    has_encoder: bool = False
    """Whether the verifier reads prompts with an encoder of its own."""


def check_pair(models: ModelsConfig) -> Pairing:
    """Look at both models without loading weights, and find what they share.

    Raises:
        JobError: a model is not there, has pickled weights only, is of a kind that is not
            supported, or the two disagree about a token.
    """
    sides = [("drafter", models.drafter), ("verifier", models.verifier)]
    configs = all_of([partial(_config, role, model) for role, model in sides])
    tokenizers = all_of([partial(_tokenizer, role, model) for role, model in sides])
    if not models.allow_different_vocabularies:
        _check_same_tokens(*tokenizers)
    sizes = [len(tokenizer) for tokenizer in tokenizers]
    vocabulary = min(*sizes, *(int(config.get_text_config().vocab_size) for config in configs))
    eos = _eos_token_ids(models.verifier, configs[1], tokenizers[1])
    if any(token >= vocabulary for token in eos) or not eos:
        raise JobError(
            f"models.verifier.path: the end-of-text ids {list(eos)} are not among the "
            f"{vocabulary} ids that both models know; the pair cannot end a text"
        )
    has_encoder = bool(configs[1].is_encoder_decoder)
    return Pairing(tokenizers[1], vocabulary, eos, _context(configs[1]), has_encoder)


def count_gpus() -> int:
    """How many GPUs this process sees."""
    return torch.cuda.device_count()


def _config(role: str, model: ModelConfig) -> PreTrainedConfig:
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        _check_folder(role, model, folder)
    elif model.path.startswith((".", "/", "~")) or model.path.count("/") > 1:
        raise JobError(
            f"models.{role}.path: there is no folder '{model.path}'{near_path(folder)}; paths are "
            f"relative to {Path.cwd()}"
        )
    config = _loaded(lambda: load_config(model), role, model)
    if getattr(config, "transformers_weights", None) is not None:
        raise JobError(
            f"models.{role}.path: {model.path} keeps its weights in {config.transformers_weights}; "
            f"save them as {_WEIGHTS}"
        )
    text = config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None) is not None:
        raise JobError(
            f"models.{role}.path: {model.path} caps attention logits, which is not supported"
        )
    unknown = set(getattr(text, "layer_types", None) or []) - {
        "full_attention",
        "sliding_attention",
    }
    if unknown:
        raise JobError(
            f"models.{role}.path: {model.path} has layers of kind {', '.join(sorted(unknown))}; "
            "only full and sliding attention are supported"
        )
    if config.is_encoder_decoder and config.model_type not in {"t5", "mt5"}:
        raise JobError(
            f"models.{role}.path: {model.path} is an encoder-decoder of kind "
            f"{config.model_type}; of those only T5 models are supported"
        )
    return config


def _check_folder(role: str, model: ModelConfig, folder: Path) -> None:
    """Refuse a folder that is no saved model: `transformers` would make up what is missing."""
    if model.revision is not None:
        raise JobError(
            f"models.{role}.revision is '{model.revision}', but {folder} is a folder, which has "
            "none; remove it"
        )
    if (folder / "adapter_config.json").exists():
        raise JobError(
            f"models.{role}.path: {folder} is an adapter of another model; merge it into that model"
        )
    files = _weight_files(role, folder)
    for name in ("config.json", *files):
        if not (folder / name).is_file():
            raise JobError(
                f"models.{role}.path: {folder} holds no {name}; save the model there again"
            )
    if not any(file for pattern in _TOKENIZERS for file in folder.glob(pattern)):
        raise JobError(f"models.{role}.path: {folder} holds no tokenizer; save it there too")
    for name in files:
        try:
            with safe_open(folder / name, framework="numpy"):  # reads the header alone
                pass
        except (OSError, SafetensorError) as error:
            raise JobError(
                f"models.{role}.path: {folder / name} is no whole safetensors file "
                f"({_one_line(error)}); copy or download it again"
            ) from error


def _weight_files(role: str, folder: Path) -> list[str]:
    """The names of the files that hold the weights, whether they are there or not."""
    index = folder / f"{_WEIGHTS}.index.json"
    if (folder / _WEIGHTS).is_file():
        return [_WEIGHTS]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JobError(f"models.{role}.path: {index} is no index of weights") from error
        _check_names(role, index, names)
        return names
    pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
    remedy = "convert its pickled weights" if pickled else "point it at a saved model"
    raise JobError(f"models.{role}.path: {folder} holds no {_WEIGHTS} file; {remedy}")


def _check_names(role: str, index: Path, names: Sequence[str]) -> None:
    """Refuse an index that leads out of its folder or to another format: some run what they hold."""
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise JobError(
                f"models.{role}.path: {index} names '{name}', which is no safetensors file beside it; "
                "save the model again as safetensors"
            )


def _tokenizer(role: str, model: ModelConfig) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = _loaded(lambda: load_tokenizer(model), role, model)
    # Without its own code `transformers` makes do with the class that the architecture suggests.
    own = tokenizer.init_kwargs.get("auto_map")
    if own and not model.trust_remote_code and (isinstance(own, list) or "AutoTokenizer" in own):
        raise _own_code(role, model)
    return tokenizer


def _own_code(role: str, model: ModelConfig) -> JobError:
    return JobError(
        f"models.{role}.trust_remote_code is false, but '{model.path}' comes with Python code that "
        "would have to be run; set it to true if you trust that code"
    )


def _loaded(load: Callable[[], Any], role: str, model: ModelConfig) -> Any:
    """What `transformers` loads; whatever a broken file makes it raise is the job's mistake."""
    try:
        return load()
    except Exception as error:
        if not model.trust_remote_code and "trust_remote_code" in str(error):
            raise _own_code(role, model) from error
        if Path(model.path).expanduser().is_dir():
            raise JobError(
                f"models.{role}.path: the model in {model.path} cannot be read: {_one_line(error)}"
            ) from error
        raise JobError(
            f"models.{role}.path: '{model.path}' is neither a folder with a model, relative to "
            f"{Path.cwd()}{near_path(model.path)}, nor a model that can be had from the hub: "
            f"{_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")


def _check_same_tokens(drafter: PreTrainedTokenizerBase, verifier: PreTrainedTokenizerBase) -> None:
    drafter_tokens = {number: token for token, number in drafter.get_vocab().items()}
    verifier_tokens = {number: token for token, number in verifier.get_vocab().items()}
    shared = sorted(drafter_tokens.keys() & verifier_tokens.keys())
    for number in shared:
        if drafter_tokens[number] != verifier_tokens[number]:
            raise JobError(
                f"models: id {number} is {drafter_tokens[number]!r} to the drafter and "
                f"{verifier_tokens[number]!r} to the verifier; choose two models with one "
                "tokenizer, or set models.allow_different_vocabularies: true"
            )
    if not shared:
        raise JobError("models: the tokenizers of drafter and verifier share no id")


def _eos_token_ids(
    model: ModelConfig, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """All ids that end a text: the generation config's, else the config's, and the tokenizer's."""
    try:
        generation = GenerationConfig.from_pretrained(model.path, revision=model.revision)
        given = generation.eos_token_id
    except OSError:
        given = None
    except (TypeError, ValueError, AttributeError) as error:
        raise JobError(
            f"models.verifier.path: generation_config.json of {model.path} cannot be read: "
            f"{_one_line(error)}"
        ) from error
    given = given if given is not None else config.get_text_config().eos_token_id
    ids = [*(given if isinstance(given, list) else [given]), tokenizer.eos_token_id]
    found = {token for token in ids if token is not None}
    if any(not isinstance(token, int) or token < 0 for token in found):
        raise JobError(
            f"models.verifier.path: the end-of-text ids of {model.path} are {given!r}; give whole "
            "numbers in generation_config.json"
        )
    return tuple(sorted(found))


def _context(config: PreTrainedConfig) -> int | None:
    """The positions a decoder-only model has; T5 counts distances and has no limit."""
    if config.is_encoder_decoder:
        return None
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None
