"""The strategies of a run as tensors, so that all pairs of a round are judged at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pipeline.protocol.strategies import KINDS, Execution, Kind, target_of
from pipeline.protocol.targets import Target
from pipeline.records import Strategy

EXECUTIONS = {execution: number for number, execution in enumerate(Execution)}
"""What an execution is in a tensor."""


@dataclass(frozen=True)
class Lineup:
    """One entry a strategy, (S,) each; NaN where a strategy has no such parameter, so that misuse shows."""

    executions: Tensor
    """The numbers of `EXECUTIONS`."""
    thresholds: Tensor
    betas: Tensor
    """NaN means tuned."""
    fallbacks: Tensor
    """-inf where the block is not dynamic: it never falls back."""
    defers: Tensor
    """Whether there is a choice between the models."""
    groups: Tensor
    """Which of `targets` a strategy samples from."""
    targets: tuple[Target, ...]
    kinds: tuple[Kind, ...]
    """One a target."""
    is_dynamic: bool
    """Whether any strategy has a dynamic block."""

    @property
    def has(self) -> frozenset[Execution]:
        """The executions that there are."""
        return frozenset(kind.execution for kind in self.kinds)


@cache
def lineup_of(strategies: tuple[Strategy, ...], dtype: torch.dtype, device: torch.device) -> Lineup:
    """The strategies as tensors of a dtype on a device. Raises `StrategyError` as `target_of` does."""
    kinds = [KINDS[strategy.use] for strategy in strategies]
    names = [(strategy.use, strategy.target) for strategy in strategies]
    groups = list(dict.fromkeys(names))
    firsts = [strategies[names.index(group)] for group in groups]
    targets = tuple(target_of(strategy) for strategy in firsts)

    def column(values: Sequence[object], missing: float = torch.nan) -> Tensor:
        numbers = [value if isinstance(value, float | int) else missing for value in values]
        return torch.tensor(numbers, dtype=dtype, device=device)

    def labels(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=device)

    return Lineup(
        executions=labels([EXECUTIONS[kind.execution] for kind in kinds]),
        thresholds=column([vars(s)[k.threshold] for s, k in zip(strategies, kinds, strict=True)]),
        betas=column([strategy.beta for strategy in strategies]),
        fallbacks=column([strategy.fallback for strategy in strategies], -torch.inf),
        defers=torch.tensor([target_of(s).defers for s in strategies], device=device),
        groups=labels([groups.index(name) for name in names]),
        targets=targets,
        kinds=tuple(KINDS[strategy.use] for strategy in firsts),
        is_dynamic=any(kind.dynamic for kind in kinds),
    )
