"""How a draft block's distributions cross from drafter to verifier: as few bytes as are exact.

The drafter samples from exactly what it ships, so the method is unbiased with every transport. All
but `bfloat16` give the same rows, bit for bit; that one rounds the logits before anything is drawn.

| name       | ships                                             | where it is exact                     |
| ---------- | ------------------------------------------------- | ------------------------------------- |
| `tokens`   | the tokens; the drafter's maxima and entropies    | greedy drafts                         |
| `top_k`    | the logits of the top-k support, and the same     | drafts sampled with top-k             |
| `bfloat16` | all logits in 16 bits                             | a drafter that computes in bfloat16   |
| `float32`  | all logits                                        | always                                |

The first two cannot serve a rule that reads the drafter's confidence in every token, nor a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.protocol.blocks import DrafterFacts
from pipeline.protocol.positions import Distributions
from pipeline.protocol.strategies import KINDS
from pipeline.records import Setting, Strategy

Transport = Literal["tokens", "top_k", "bfloat16", "float32"]

_WORTHWHILE = 8
"""A support is shipped where the vocabulary is at least so many times larger."""


@dataclass(frozen=True)
class Packed:
    """The distributions of a block on the wire. A lanes, D columns.

    `logits` is (A, D, V), or (A, D, K) at the ids `support`; bfloat16 travels as its bits in int16,
    which numpy knows. `facts` is (A, D, 3), the fields of `DrafterFacts`.
    """

    logits: NDArray[Any]
    support: NDArray[np.int32] | None = None
    facts: NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.logits, self.support, self.facts)
        return sum(array.nbytes for array in arrays if array is not None)


def exact_transport(
    strategies: Sequence[Strategy], settings: Sequence[Setting], vocabulary: int, trace: bool
) -> Transport:
    """The smallest transport that is exact for a job, whatever its drafter computes in."""
    if trace or needs_all_confidences(strategies):
        return "float32"
    if all(setting.drafting.temperature == 0 for setting in settings):
        return "tokens"
    top_k = max(setting.drafting.top_k or vocabulary for setting in settings)
    return "top_k" if top_k * _WORTHWHILE <= vocabulary else "float32"


def needs_all_confidences(strategies: Sequence[Strategy]) -> bool:
    """Whether a rule reads the drafter's confidence in tokens other than the drafted one."""
    return any(KINDS[strategy.use].reads_drafter_confidence for strategy in strategies)


def rounded(transport: Transport, logits: Tensor) -> Tensor:
    """The logits as the verifier will see them; the drafter must draw from these."""
    return logits.bfloat16().float() if transport == "bfloat16" else logits


def facts_read(strategies: Sequence[Strategy]) -> frozenset[str]:
    """Which of the `DrafterFacts` the rules of a run read."""
    return frozenset().union(*(KINDS[strategy.use].facts_read for strategy in strategies))


def pack(
    transport: Transport,
    logits: Tensor,
    tokens: Tensor,
    setting: Setting,
    facts_read: frozenset[str] = frozenset(DrafterFacts.__annotations__),
) -> Packed:
    """Pack a block's logits (A, D, V), from which its tokens (A, D) were drawn.

    Args:
        facts_read: the facts to ship beside a support; the others are NaN.
    """
    if transport == "float32":
        return Packed(logits.cpu().numpy())
    if transport == "bfloat16":
        return Packed(logits.bfloat16().view(torch.int16).cpu().numpy())
    facts = _facts(logits, tokens, setting, facts_read).cpu().numpy()
    if transport == "tokens":
        return Packed(np.empty((*tokens.shape, 0), np.float32), None, facts)
    assert setting.drafting.top_k is not None
    kth = logits.topk(setting.drafting.top_k, dim=-1).values[..., -1:]
    # As many as the fullest position keeps, ties with the k-th included: sampling keeps them too.
    width = int((logits >= kth).sum(dim=-1).max())
    values, support = logits.topk(width, dim=-1)
    values = values.masked_fill(values < kth, -torch.inf)
    return Packed(values.cpu().numpy(), support.to(torch.int32).cpu().numpy(), facts)


def unpack(
    packed: Packed, tokens: Tensor, vocabulary: int
) -> tuple[Tensor | None, DrafterFacts | None]:
    """The logits (A, D, V) that sampling is done from, and what the drafter said beside them.

    Tokens alone have no logits. Outside a support they are -inf, so that the same arithmetic gives
    the same bits as on the whole.
    """
    device = tokens.device
    logits = as_tensor(packed.logits, device)
    if logits.dtype == torch.int16:
        return logits.view(torch.bfloat16).float(), None
    if packed.facts is None:
        return logits, None
    facts = DrafterFacts(*as_tensor(packed.facts, device).unbind(dim=-1))
    if packed.support is None:
        return None, facts
    empty = torch.full((*tokens.shape, vocabulary), -torch.inf, device=device)
    return empty.scatter(-1, as_tensor(packed.support, device).long(), logits), facts


def as_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor that shares the array where it can. Arrays that came over Ray are read-only.

    Torch would warn about those and cannot mark a tensor read-only, so they are copied.
    """
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)


def _facts(logits: Tensor, tokens: Tensor, setting: Setting, facts_read: frozenset[str]) -> Tensor:
    """What rules read of the drafter's confidences, (A, D, 3); NaN what they do not."""
    positions = Distributions(logits.flatten(0, 1), setting.drafting)
    ask: dict[str, Callable[[], Tensor]] = {
        "peaks": lambda: positions.peaks,
        "entropies": lambda: positions.entropies,
        "of_draft": lambda: positions.confidences_in(tokens.flatten()),
    }
    unknown = torch.full_like(logits[..., :1].flatten(0, 1), torch.nan)
    facts = [known() if name in facts_read else unknown for name, known in ask.items()]
    return torch.cat(facts, dim=1).view(*tokens.shape, len(facts))
