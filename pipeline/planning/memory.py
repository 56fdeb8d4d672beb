"""What a worker holds in memory: weights, the caches of its banks, and what a pass needs for a while.

Weights and caches are exact. What a pass needs is an estimate from above, for a full bank of A lanes, D
drafted columns and V ids, with float32 numbers of 4 bytes:

- logits: `LOGITS` copies of A x (D + 1) x V x 4. The logits as the model gives them and in float32, the
  drafter's beside the verifier's, sampling distributions and confidences of both, products of those, and
  what has come or goes over the wire. Torch's profiler saw up to 3 in a drafter and 10 in a verifier.
- attention: A x heads x (D + 1) x columns x 4 in a step; heads x tokens x longest prompt x 4 where
  prompts of up to `PREFILL_TOKENS` tokens are read together. Kernels that do not write the scores out
  need less.

What a CUDA process takes for itself, about half a GB, is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.models.sizes import ModelSize
from pipeline.workers.drafter import PREFILL_TOKENS

LOGITS = {"drafter": 4, "verifier": 12}
"""How many arrays of a block's logits a worker holds at its worst moment."""


@dataclass(frozen=True)
class Load:
    """What a worker is to hold: banks of so many slots, and the longest texts."""

    banks: int
    slots: int
    block: int
    """Columns of a full draft block."""
    prompt: int
    """Tokens of the longest prompt."""
    written: int
    """Tokens of the longest output."""
    vocabulary: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker, on all of its devices together."""

    weights: int
    caches: int
    passes: int
    """An estimate."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.caches + self.passes


def memory_of(role: str, size: ModelSize, load: Load) -> Memory:
    """What a `drafter` or a `verifier` holds when its slots are full of the longest texts."""
    columns = size.columns(load.prompt, load.written, load.block)
    caches = load.banks * size.bank_bytes(load.slots, columns, load.prompt)
    width = load.block + 1
    logits = LOGITS[role] * load.slots * width * load.vocabulary * 4
    step = load.slots * size.heads * width * columns * 4
    reading = size.heads * max(PREFILL_TOKENS, load.prompt) * load.prompt * 4
    return Memory(size.weight_bytes, caches, max(logits, step, reading))
