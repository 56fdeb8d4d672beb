"""Optimizers and their schedule.

T5 draws query weights with a deviation of (width * head size)^-0.5, so a flat Adam step is large
for them and a wide model stays a language model that ignores its source. They get smaller steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import T5ForConditionalGeneration


@dataclass(frozen=True)
class Rates:
    """Peak learning rates: Adam for all weights, or Muon for hidden matrices where given.

    `decay` is the weight decay of Muon's matrices, relative to their learning rate.
    """

    adam: float
    muon: float | None = None
    decay: float = 0.01


def parameter_groups(model: T5ForConditionalGeneration) -> dict[str, list[nn.Parameter]]:
    """A model's weights by the treatment that they get."""
    groups: dict[str, list[nn.Parameter]] = {
        "embedding": [],
        "other": [],
        "query": [],
        "hidden": [],
    }
    for name, weight in model.named_parameters():
        if "shared" in name:
            groups["embedding"].append(weight)
        elif weight.ndim < 2 or "relative_attention_bias" in name:
            groups["other"].append(weight)
        else:
            groups["query" if name.endswith(".q.weight") else "hidden"].append(weight)
    return groups


def optimizers_for(model: T5ForConditionalGeneration, rates: Rates) -> list[Optimizer]:
    """The optimizers of one model; each parameter group keeps its peak rate as `peak`."""
    groups = parameter_groups(model)
    shrink = model.config.d_kv**-0.5
    matrix = rates.adam if rates.muon is None else rates.muon
    vectors = [
        {"params": groups["embedding"], "lr": rates.adam * 3},
        {"params": groups["other"], "lr": rates.adam},
    ]
    matrices = [
        {"params": groups["hidden"], "lr": matrix},
        {"params": groups["query"], "lr": matrix * shrink},
    ]
    built: list[Optimizer] = []
    if rates.muon is not None:
        built.append(Muon(matrices, weight_decay=rates.decay, adjust_lr_fn="match_rms_adamw"))
    adam = vectors if rates.muon is not None else [*vectors, *matrices]
    built.append(AdamW(adam, betas=(0.9, 0.98), weight_decay=0.01, fused=True))
    for group in (g for optimizer in built for g in optimizer.param_groups):
        group["peak"] = group["lr"]
    return built


def share_of_peak(done: float, knots: Sequence[tuple[float, float]]) -> float:
    """The share of the peak rates after a part `done` of the run: straight lines between knots."""
    for (start, low), (end, high) in pairwise(knots):
        if done <= end:
            return low + (high - low) * (done - start) / (end - start)
    raise ValueError("the knots of a schedule must end at 1")


def set_rates(optimizers: list[Optimizer], share: float) -> None:
    """Sets every group's learning rate to a share of its peak."""
    for group in (g for optimizer in optimizers for g in optimizer.param_groups):
        group["lr"] = group["peak"] * share


def flat_gradient(model: nn.Module) -> torch.Tensor:
    """One buffer whose pieces are the gradients of all weights, so that one call reduces all."""
    weights = list(model.parameters())
    buffer = torch.zeros(sum(weight.numel() for weight in weights))
    start = 0
    for weight in weights:
        weight.grad = buffer[start : start + weight.numel()].view_as(weight)
        start += weight.numel()
    return buffer


def clip(buffer: torch.Tensor, largest: float = 1.0) -> None:
    """Scales a flat gradient down to a norm of at most `largest`."""
    buffer.mul_((largest / (buffer.norm() + 1e-6)).clamp(max=1.0))
