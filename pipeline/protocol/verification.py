"""One verification: judge a drafted block for every strategy that rides in its lanes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pipeline.protocol.blocks import Block, Pairs, Verdicts
from pipeline.protocol.judging import Judging
from pipeline.protocol.lineup import lineup_of
from pipeline.protocol.rounds import Round
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
    lineup = lineup_of(tuple(strategies), verifier_logits.dtype, verifier_logits.device)
    return Judging(Round(block, verifier_logits, setting), pairs, lineup).verdicts(trace)
