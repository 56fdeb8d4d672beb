"""How large a model is in memory, found from its config: no weight is read.

The model is built on torch's meta device, where tensors have shapes and no data. So parameters that
a model shares with itself (tied embeddings) count once, whatever its files hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from pipeline.config import ModelConfig
from pipeline.models.caching import REGISTER
from pipeline.models.loading import load_config
from pipeline.models.slots import COLUMNS, COMPILED_COLUMNS, MIN_ROWS, in_columns

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""How safetensors calls the types of weights."""


@dataclass(frozen=True)
class ModelSize:
    """What a loaded model and its banks take, from its shapes alone."""

    parameters: int
    weight_bytes: int
    dtype: str
    """What it computes and caches in, as in a job; its files' own where the job says `auto`."""
    number_bytes: int
    """Bytes of one number in its caches."""
    layers: int
    """Of the decoder."""
    heads: int
    """Of its queries."""
    key_heads: int
    """Of its keys and values, fewer where heads are grouped."""
    head_size: int
    context: int | None
    """The positions that a sequence may have; None if there is no limit."""
    has_encoder: bool
    is_compiled: bool

    def columns(self, prompt: int, written: int, block: int) -> int:
        """Cache columns of a lane at its longest.

        The last block of a text begins at its last token at the latest, and columns are computed for
        all of the block: prefix + written + block - 1, rounded up as caches are. The prefix is the
        prompt, or the start token where an encoder reads the prompt.
        """
        longest = (1 if self.has_encoder else prompt) + written + block - 1
        if self.context is not None:
            longest = min(longest, self.context)
        return in_columns(longest, COMPILED_COLUMNS if self.is_compiled else COLUMNS)

    def bank_bytes(self, slots: int, columns: int, prompt: int) -> int:
        """Bytes of the caches of one bank.

        Self-attention: layers x 2 x key heads x head size x columns x slots x bytes of a number, and 8
        bytes a column for the token that it holds. With an encoder also the cross-attention: layers
        x 2 x heads x head size x source x slots x bytes of a number, and one number a source column for
        its mask; source is the longest prompt, rounded up to a register.
        """
        rows = max(slots, MIN_ROWS)
        column = self.layers * 2 * self.key_heads * self.head_size * self.number_bytes
        own = rows * columns * (column + 8)
        if not self.has_encoder:
            return own
        return own + rows * in_columns(prompt, REGISTER) * (column + self.number_bytes)


def model_size(given: ModelConfig) -> ModelSize:
    """The size of a model that can be loaded. Raises whatever `transformers` does if it cannot."""
    config = load_config(given)
    dtype = _dtype(given, config)
    text = config.get_text_config()
    # Building a model writes to its config, so what is read of it is read first.
    layers = getattr(text, "num_decoder_layers", None) or text.num_hidden_layers
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=dtype, trust_remote_code=given.trust_remote_code)
    return ModelSize(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=sum(_weight_bytes(model, dtype)),
        dtype=str(dtype).removeprefix("torch."),
        number_bytes=dtype.itemsize,
        layers=layers,
        heads=heads,
        key_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=head_size,
        context=None
        if config.is_encoder_decoder
        else getattr(text, "max_position_embeddings", None),
        has_encoder=bool(config.is_encoder_decoder),
        is_compiled=given.compile,
    )


def _weight_bytes(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[int]:
    """Bytes of each parameter as `from_pretrained` leaves it: some stay in 32 bits."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        is_kept = dtype.itemsize < 4 and not kept.isdisjoint(name.split("."))
        yield parameter.numel() * (4 if is_kept else parameter.itemsize)


def _dtype(given: ModelConfig, config: PreTrainedConfig) -> torch.dtype:
    """What `from_pretrained` would load in: the job's, the config's, or that of the first file."""
    dtype: torch.dtype | None = config.dtype
    if given.dtype != "auto":
        dtype = getattr(torch, given.dtype)
    if dtype is not None:
        return dtype
    files = sorted(Path(given.path).expanduser().glob("*.safetensors"))
    if not files:  # a hub model whose config does not say; what its files hold is not known here
        return torch.float32
    with safe_open(files[0], framework="numpy") as file:  # reads the header alone
        found = [file.get_slice(name).get_dtype() for name in file.keys()]  # noqa: SIM118
    return next((_DTYPES[name] for name in found if name in _DTYPES), torch.float32)
