"""Tiny models with random weights that do not merely repeat themselves, for both families."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from pipeline.models.causal import CausalModel
from pipeline.models.interface import LanguageModel
from pipeline.models.seq2seq import Seq2SeqModel
from pipeline.models.slots import ATTENTION

VOCABULARY = 61
PAD, EOS = 0, 1

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
_IDS = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": 2}
_GROUPED = {**_SIZES, **_IDS, "intermediate_size": 64, "num_key_value_heads": 2}


def _config(name: str, positions: int) -> PreTrainedConfig:
    if name == "llama":
        return LlamaConfig(**_GROUPED, max_position_embeddings=positions)
    if name == "qwen2_hybrid":
        layers = ["sliding_attention", "full_attention"]
        return Qwen2Config(
            **_GROUPED,
            use_sliding_window=True,
            sliding_window=6,
            layer_types=layers,
            max_position_embeddings=positions,
        )
    if name == "qwen3":
        return Qwen3Config(**_GROUPED, head_dim=8, max_position_embeddings=positions)
    if name == "gemma3":
        return Gemma3TextConfig(
            **_GROUPED,
            head_dim=8,
            sliding_window=6,
            max_position_embeddings=positions,
            layer_types=["sliding_attention", "full_attention"],
        )
    if name == "gpt2":
        return GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=positions, **_IDS
        )
    gated = "gated-gelu" if name == "t5_gated" else "relu"
    return T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        vocab_size=VOCABULARY,
        feed_forward_proj=gated,
        decoder_start_token_id=PAD,
        scale_decoder_outputs=name != "t5_gated",
        **{k: _IDS[k] for k in ("pad_token_id", "eos_token_id")},
    )


CAUSAL = ("llama", "gpt2", "qwen2_hybrid", "qwen3", "gemma3")
SEQ2SEQ = ("t5_relu", "t5_gated")


def hf_model(name: str, seed: int = 0, positions: int = 256) -> PreTrainedModel:
    """A tiny `transformers` model. Weights are large enough that its text varies."""
    torch.manual_seed(seed)
    auto = AutoModelForSeq2SeqLM if name in SEQ2SEQ else AutoModelForCausalLM
    model = auto.from_config(_config(name, positions)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                # A tied random model repeats its last token; larger weights make it look further.
                scale = 2.0 if "relative_attention_bias" in parameter_name else 0.35
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = PAD
    return model


def slot_model(
    name: str,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    positions: int = 256,
    dtype: torch.dtype = torch.float32,
) -> LanguageModel:
    """The same weights behind our interface."""
    model = hf_model(name, seed, positions).to(dtype)
    model.set_attn_implementation(ATTENTION)
    return Seq2SeqModel(model, vocabulary) if name in SEQ2SEQ else CausalModel(model, vocabulary)
