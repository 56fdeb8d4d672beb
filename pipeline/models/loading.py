"""Loading weights into a model that the protocol can use."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from pipeline.config import JobError, ModelConfig
from pipeline.models.causal import CausalModel
from pipeline.models.interface import LanguageModel
from pipeline.models.seq2seq import Seq2SeqModel
from pipeline.models.slots import ATTENTION


def load_model(config: ModelConfig, vocabulary: int, num_gpus: float = 1) -> LanguageModel:
    """Load a model from a local folder or the hub. Weights are safetensors; pickles are refused.

    Args:
        vocabulary: the ids both models of the pair know; logits are cut to it.
        num_gpus: what it may have; its layers are dealt to several, where they are there.

    Raises:
        ValueError: some of the model's weights are not there.
        JobError: it is for several GPUs, and accelerate is not installed.
    """
    is_dealt = config.device == "auto" and num_gpus > 1 and torch.cuda.device_count() > 1
    if is_dealt and find_spec("accelerate") is None:
        raise JobError(
            f"{num_gpus:g} GPUs for one model need accelerate, which is not installed; install the "
            "project as '.[gpu]'"
        )
    logging.disable_progress_bar()  # the run has its own
    described = load_config(config)
    auto = AutoModelForSeq2SeqLM if described.is_encoder_decoder else AutoModelForCausalLM
    model, found = auto.from_pretrained(
        config.path,
        dtype=config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        attn_implementation=ATTENTION,
        use_safetensors=True,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        device_map="auto" if is_dealt else None,
        output_loading_info=True,
    )
    if found["missing_keys"]:  # `transformers` draws these at random
        raise ValueError(
            f"{config.path} has no weights for {', '.join(sorted(found['missing_keys']))}"
        )
    if not is_dealt:
        model = model.to(_device(config.device))
    wrapped = Seq2SeqModel if described.is_encoder_decoder else CausalModel
    loaded = wrapped(model, vocabulary)
    if config.compile:
        loaded.compile()
    return loaded


def load_config(config: ModelConfig) -> PreTrainedConfig:
    """The architecture of a model, without its weights."""
    return AutoConfig.from_pretrained(
        config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
    )


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model."""
    return AutoTokenizer.from_pretrained(
        config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
    )


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
