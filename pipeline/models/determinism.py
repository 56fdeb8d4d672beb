"""Linear algebra that ignores the batch.

A matrix product may choose another kernel, and so other last bits, for another number of rows; then
a lane's text depends on its neighbours. With MKL two things keep them apart: the strict mode of its
conditional numerical reproducibility, which must be asked for before the first product of the
process and costs nothing measurable, and no product of fewer than four rows (`slots.MIN_ROWS`),
which processors that are not Intel's compute with another kernel whatever the mode.

Elementwise kernels have a rest too: where a layer's width is no multiple of 32, the last values of a
tensor may differ in the last bit with its size. Models in use have wider steps.
"""

from __future__ import annotations

import os

import torch
from torch.nn.functional import scaled_dot_product_attention

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
    """Whether this machine's CPU gives a row the same bits whatever stands beside it.

    Tries matrix products with other numbers of rows, and attention with other numbers of lanes,
    queries and cache columns.
    """
    return _products_are_invariant() and _attention_is_invariant()


def _products_are_invariant() -> bool:
    generator = torch.Generator().manual_seed(0)
    rows, weights = (torch.randn(shape, generator=generator) for shape in ((96, 256), (256, 512)))
    whole = rows @ weights
    return all(torch.equal(rows[:count] @ weights, whole[:count]) for count in (4, 5, 8, 17, 64))


def _attention_is_invariant() -> bool:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(8, 2, 64, 32, generator=generator) for _ in range(3))
    mask = torch.zeros(8, 1, 64, 64)
    mask[..., 9:] = torch.finfo(mask.dtype).min
    whole = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    parts = [(1, 4, 64), (3, 6, 32), (8, 5, 16)]
    return all(
        torch.equal(
            scaled_dot_product_attention(
                query[:lanes, :, :queries],
                key[:lanes, :, :columns],
                value[:lanes, :, :columns],
                attn_mask=mask[:lanes, :, :queries, :columns],
            ),
            whole[:lanes, :, :queries],
        )
        for lanes, queries, columns in parts
    )
