"""What crosses from a drafter to a verifier in a round, counted on an empty request of the real kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.workers.transport import Packed, Transport
from pipeline.workers.wire import VerifyRequest


@dataclass(frozen=True)
class Round:
    """A round's block: its lanes, its drafted columns, and the strategies that ride in its lanes."""

    lanes: int
    columns: int
    pairs: int
    vocabulary: int
    top_k: int | None = None
    """What drafts are sampled with."""


def request_bytes(transport: Transport, block: Round) -> int:
    """Bytes of the arrays of a request, as `WorkerStats.bytes_sent` counts them.

    A lanes, D columns, V vocabulary, P pairs: A x D x V x 4 (float32) or 2 (bfloat16), A x D x (K x 8
    + 12) for the support of top-k sampling, A x D x 12 for tokens; beside that A x (D + 6) x 8 + 2 A
    for where the lanes stand, and 16 P. Prompts of new lanes are not counted.
    """
    lanes, per_lane = (block.lanes,), np.empty(block.lanes, np.int64)
    flags, per_pair = np.empty(lanes, np.bool_), np.empty(block.pairs, np.int64)
    # Memory that is never touched costs nothing, however wide the vocabulary.
    return VerifyRequest(
        bank="",
        setting=0,
        slots=block.lanes,
        round=0,
        fresh=False,
        openings=(),
        columns=block.columns,
        last_tokens=per_lane,
        tokens=np.empty((block.lanes, block.columns), np.int64),
        draft=_packed(transport, block),
        num_drafted=per_lane,
        ended=flags,
        exhausted=flags,
        budgets=per_lane,
        starts=per_lane,
        keys=per_lane,
        repeats=per_lane,
        pair_rows=per_pair,
        pair_strategies=per_pair,
    ).nbytes


def _packed(transport: Transport, block: Round) -> Packed:
    """The distributions as `pack` would pack them, without ties at the end of a top-k support."""
    shape = (block.lanes, block.columns)
    if transport == "float32":
        return Packed(np.empty((*shape, block.vocabulary), np.float32))
    if transport == "bfloat16":
        return Packed(np.empty((*shape, block.vocabulary), np.int16))
    facts = np.empty((*shape, 3), np.float32)
    if transport == "tokens":
        return Packed(np.empty((*shape, 0), np.float32), None, facts)
    support = np.empty((*shape, block.top_k or block.vocabulary), np.int32)
    return Packed(support.view(np.float32), support, facts)
