"""Linear algebra that ignores the batch.

A matrix product may choose another kernel, and so other last bits, for another number of rows; then
a lane's text depends on its neighbours. On CPUs with Intel's MKL (also AMD's) the strict mode of its
conditional numerical reproducibility makes each row the same whatever stands beside it, at no
measurable cost. It must be asked for before the first product of the process.
"""

from __future__ import annotations

import os

import torch

_REPRODUCIBLE = ("MKL_CBWR", "AUTO,STRICT")


def prepare_numerics(threads: int | None = None) -> None:
    """Ask for batch-invariant linear algebra; call it before a process computes anything.

    Args:
        threads: CPU threads of this process for one operation; None leaves torch's choice.
    """
    os.environ.setdefault(*_REPRODUCIBLE)
    if threads is not None:
        torch.set_num_threads(threads)


def is_batch_invariant() -> bool:
    """Whether rows of a product are bitwise the same for other numbers of rows, on this machine's CPU."""
    generator = torch.Generator().manual_seed(0)
    rows, weights = (torch.randn(shape, generator=generator) for shape in ((96, 256), (256, 512)))
    whole = rows @ weights
    return all(torch.equal(rows[:count] @ weights, whole[:count]) for count in (1, 3, 8, 17, 64))
