"""Keeping large temporaries in the process.

The C library of most Linux systems gives a block above 32 MB back to the system when it is freed, so
each large temporary (the logits of a wide vocabulary) is cleared page by page again, which costs
several times the arithmetic done on it.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_MMAP_BYTES, _TRIM_BYTES = 2**30, 2**31 - 1


def keep_freed_memory() -> None:
    """Let this process keep what it frees; for workers, whose tensors have the same sizes every round."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _TRIM_BYTES)
