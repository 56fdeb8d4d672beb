"""Teaching a drafter to write as its verifier does, in minutes on one core.

The lessons are greedy answers of the verifier. Its last hidden states are kept as it writes them: its
distributions are then one product away, and no text is read by the verifier twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear, pad
from transformers import PreTrainedModel

from tests.benchmarks.engine import padded

ANSWERS_AT_ONCE = 64
LONGEST_ANSWER = 48
EPOCHS = 5
BATCH = 4
LEARNING_RATE = 1.5e-3
RANDOM_IDS = 2048
"""How many ids a step compares besides those of the answers: a head over all would be most of its time."""


@dataclass(frozen=True)
class Lessons:
    """Answers of the verifier, all N texts right-aligned on their prompts' ends.

    `tokens` is int64 (N, W + L): prompts padded on the left to W, then L answer tokens; `visible` is
    False on padding. `states` (N, L, H) are what the verifier drew each answer token from, and
    `counts` (N, L) says which of them stand up to the end of the text.
    """

    tokens: Tensor
    visible: Tensor
    states: Tensor
    counts: Tensor

    def ids(self) -> Tensor:
        """Which ids the answers are made of."""
        return self.tokens[:, -self.counts.shape[1] :][self.counts].unique()

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Lessons]:
        """All of them once, in random order."""
        for rows in torch.randperm(len(self.tokens), generator=generator).split(size):
            yield Lessons(
                self.tokens[rows], self.visible[rows], self.states[rows], self.counts[rows]
            )


@torch.no_grad()
def answers(verifier: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> Lessons:
    """Let the verifier answer greedily."""
    tokens, mask = padded(prompts, left=True)
    visible = mask.bool()
    parts = [
        _answered(verifier, *part)
        for part in zip(tokens.split(ANSWERS_AT_ONCE), visible.split(ANSWERS_AT_ONCE), strict=True)
    ]
    written, states = (torch.cat(column) for column in zip(*parts, strict=True))
    ends = written == verifier.generation_config.eos_token_id
    counts = ends.cumsum(dim=1) - ends.long() == 0
    return Lessons(
        torch.cat([tokens, written], dim=1), torch.cat([visible, counts], dim=1), states, counts
    )


def _answered(verifier: PreTrainedModel, tokens: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    output = verifier.generate(
        tokens,
        attention_mask=visible.long(),
        do_sample=False,
        max_new_tokens=LONGEST_ANSWER,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    written = output.sequences[:, tokens.shape[1] :]
    states = torch.stack([step[-1][:, -1] for step in output.hidden_states], dim=1)
    missing = LONGEST_ANSWER - written.shape[1]
    ended = verifier.generation_config.eos_token_id
    return pad(written, (0, missing), value=ended), pad(states, (0, 0, 0, missing))


def distil(drafter: PreTrainedModel, lessons: Lessons) -> Iterator[float]:
    """Train the drafter's layers, and yield the loss of each step.

    Embeddings and head stay the verifier's: they are most of a small model, and learned already.
    """
    drafter.train()
    drafter.get_input_embeddings().requires_grad_(False)
    learned = [weight for weight in drafter.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learned, weight_decay=0.01, betas=(0.9, 0.98))
    steps = EPOCHS * -(-len(lessons.tokens) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1
    )
    generator = torch.Generator().manual_seed(0)
    vocabulary = drafter.config.vocab_size
    for _ in range(EPOCHS):
        for batch in lessons.batches(BATCH, generator):
            others = torch.randint(vocabulary, (RANDOM_IDS,), generator=generator)
            loss = divergence(drafter, batch, torch.cat([lessons.ids(), others]).unique())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            schedule.step()
            yield float(loss.detach())
    drafter.eval()


def divergence(drafter: PreTrainedModel, lessons: Lessons, ids: Tensor) -> Tensor:
    """KL of the drafter's distributions from the verifier's over some ids, a mean over the answers."""
    read = drafter.base_model(
        input_ids=lessons.tokens[:, :-1],
        attention_mask=lessons.visible[:, :-1].long(),
        use_cache=False,
    ).last_hidden_state
    head = drafter.get_output_embeddings().weight[ids]
    answer = lessons.counts.shape[1]
    drafted = linear(read[:, -answer:][lessons.counts], head).log_softmax(dim=-1)
    wanted = linear(lessons.states[lessons.counts], head).log_softmax(dim=-1)
    return kl_div(drafted, wanted, reduction="batchmean", log_target=True)
