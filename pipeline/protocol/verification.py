"""One verification: judge a drafted block for every strategy that rides in its lanes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pipeline.protocol.blocks import Block, Pairs, Verdicts
from pipeline.protocol.judging import Group
from pipeline.protocol.rounds import Round
from pipeline.protocol.strategies import target_of
from pipeline.records import Setting, Strategy


def verify(
    block: Block,
    verifier_logits: Tensor,
    pairs: Pairs,
    strategies: Sequence[Strategy],
    setting: Setting,
    trace: bool = False,
) -> Verdicts:
    """Judge a block for all pairs (Algorithm 4 with each pair's own target).

    Args:
        verifier_logits: float32 (A, D, V), or (A, D + 1, V) with the bonus column.
        trace: whether to say what the models thought at each token.
    """
    shared = Round(block, verifier_logits, setting)
    parts, order = [], []
    for group, members in _groups(pairs, strategies, shared):
        parts.append(group.judge(trace))
        order.append(members)
    place = torch.argsort(torch.cat(order))
    return Verdicts(
        **{name: torch.cat([vars(part)[name] for part in parts])[place] for name in vars(parts[0])}
    )


def _groups(
    pairs: Pairs, strategies: Sequence[Strategy], shared: Round
) -> Iterator[tuple[Group, Tensor]]:
    chosen = [strategies[index] for index in pairs.strategies.tolist()]
    by_use: dict[tuple[str, str | None], list[int]] = {}
    for pair, strategy in enumerate(chosen):
        by_use.setdefault((strategy.use, strategy.target), []).append(pair)
    for members in by_use.values():
        index = torch.tensor(members, device=pairs.rows.device)
        group = [chosen[pair] for pair in members]
        yield Group(shared, target_of(group[0]), pairs.rows[index], group), index
