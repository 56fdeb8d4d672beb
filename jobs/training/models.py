"""T5 drafters and verifiers: shape, initial weights, loss terms and folders on disk."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration


@dataclass(frozen=True)
class Architecture:
    """The size of one encoder-decoder."""

    width: int
    heads: int
    feed_forward: int
    encoder_layers: int
    decoder_layers: int


@dataclass(frozen=True)
class Batch:
    """Padded token ids, one row each: (rows, source positions) and (rows, target positions)."""

    source: Tensor
    source_mask: Tensor
    target: Tensor


def new_model(architecture: Architecture, vocabulary: int, seed: int) -> T5ForConditionalGeneration:
    """A freshly initialised model that starts as one layer deep.

    The output matrices of all but the first layers start at zero, so depth comes in gradually.
    """
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=vocabulary,
        d_model=architecture.width,
        d_kv=architecture.width // architecture.heads,
        d_ff=architecture.feed_forward,
        num_heads=architecture.heads,
        num_layers=architecture.encoder_layers,
        num_decoder_layers=architecture.decoder_layers,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    model.set_attn_implementation("eager")  # faster than the fused kernel for short texts on a CPU
    for stack in (model.encoder, model.decoder):
        for block in list(stack.block)[1:]:
            for name, weight in block.named_parameters():
                if name.endswith((".o.weight", ".wo.weight")):
                    nn.init.zeros_(weight)
    return model


def target_logits(model: T5ForConditionalGeneration, batch: Batch) -> Tensor:
    """Logits of every real target token, one row each; padding is skipped before the vocabulary."""
    start = batch.target.new_zeros(len(batch.target), 1)
    states = model.encoder(input_ids=batch.source, attention_mask=batch.source_mask)
    hidden = model.decoder(
        input_ids=torch.cat([start, batch.target[:, :-1]], dim=1),
        encoder_hidden_states=states.last_hidden_state,
        encoder_attention_mask=batch.source_mask,
        use_cache=False,
    ).last_hidden_state
    kept = hidden[batch.target != 0]
    logits: Tensor = model.lm_head(kept * model.config.d_model**-0.5)
    return logits


def target_tokens(batch: Batch) -> Tensor:
    """The real target tokens, in the order of the rows of `target_logits`."""
    return batch.target[batch.target != 0]


def distillation_loss(logits: Tensor, teacher: Tensor, tokens: Tensor, mix: float) -> Tensor:
    """Sum of cross-entropies: `mix` against the teacher's distribution, the rest against tokens."""
    scores = functional.log_softmax(logits.float(), dim=-1)
    from_teacher = -(functional.softmax(teacher.float(), dim=-1) * scores).sum(-1)
    from_text = functional.nll_loss(scores, tokens, reduction="none")
    return (mix * from_teacher + (1 - mix) * from_text).sum()


def overlap_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Sum of one minus the mass that both distributions share: the expected share of rejections."""
    drafted = functional.softmax(logits.float(), dim=-1)
    return (1 - torch.minimum(drafted, functional.softmax(teacher.float(), dim=-1)).sum(-1)).sum()


def save_folder(
    model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Writes a bfloat16 copy of the model and its tokenizer, as safetensors and JSON only."""
    copy = T5ForConditionalGeneration(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.max_new_tokens = 64
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
