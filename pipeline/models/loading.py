"""Loading weights into a model that the protocol can use."""

from __future__ import annotations

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

from pipeline.config import ModelConfig
from pipeline.models.causal import CausalModel
from pipeline.models.interface import LanguageModel
from pipeline.models.seq2seq import Seq2SeqModel
from pipeline.models.slots import ATTENTION


def load_model(config: ModelConfig, vocabulary: int) -> LanguageModel:
    """Load a model from a local folder or the hub. Weights are safetensors; pickles are refused.

    Args:
        vocabulary: the ids both models of the pair know; logits are cut to it.
    """
    logging.disable_progress_bar()  # the run has its own
    described = load_config(config)
    auto = AutoModelForSeq2SeqLM if described.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_pretrained(
        config.path,
        dtype=config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        attn_implementation=ATTENTION,
        use_safetensors=True,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    ).to(_device(config.device))
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
