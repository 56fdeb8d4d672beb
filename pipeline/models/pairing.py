"""Whether two models can work as a pair: checked from configs and tokenizers, before any weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from pipeline.config import JobError, ModelConfig, ModelsConfig
from pipeline.models.loading import load_config, load_tokenizer


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


def check_pair(models: ModelsConfig) -> Pairing:
    """Look at both models without loading weights, and find what they share.

    Raises:
        JobError: a model is not there, has pickled weights only, is of a kind that is not
            supported, or the two disagree about a token.
    """
    sides = [("drafter", models.drafter), ("verifier", models.verifier)]
    configs = [_config(role, model) for role, model in sides]
    tokenizers = [_tokenizer(role, model) for role, model in sides]
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
    return Pairing(tokenizers[1], vocabulary, eos, _context(configs[1]))


def _config(role: str, model: ModelConfig) -> PreTrainedConfig:
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        _check_weights(role, folder)
    config = _loaded(lambda: load_config(model), role, model)
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


def _check_weights(role: str, folder: Path) -> None:
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        remedy = "convert its pickled weights" if pickled else "point it at a saved model"
        raise JobError(f"models.{role}.path: {folder} holds no *.safetensors file; {remedy}")


def _tokenizer(role: str, model: ModelConfig) -> PreTrainedTokenizerBase:
    return _loaded(lambda: load_tokenizer(model), role, model)


def _loaded(load: Callable[[], Any], role: str, model: ModelConfig) -> Any:
    try:
        return load()
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise JobError(
            f"models.{role}.path: {model.path!r} is neither a folder with a model, relative to "
            f"{Path.cwd()}, nor a model that can be had from the hub: {reason}"
        ) from error


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
    given = given if given is not None else config.get_text_config().eos_token_id
    ids = given if isinstance(given, list) else [given]
    return tuple(sorted({token for token in [*ids, tokenizer.eos_token_id] if token is not None}))


def _context(config: PreTrainedConfig) -> int | None:
    """The positions a decoder-only model has; T5 counts distances and has no limit."""
    if config.is_encoder_decoder:
        return None
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None
