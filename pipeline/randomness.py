"""The only source of chance: uniforms that are data, not state.

A uniform is a pure function of (seed, example, repeat, output position, role), computed by chaining
the SplitMix64 finaliser (Steele, Lea and Flood, 2014) over the key. It does not depend on strategy,
round, batch, worker or time, so results do not depend on them either, and all strategies of an
example face the same draws.

A position may be drafted again after a rejection before it and then meets the same uniform. That is
sound: the discarded draft never influenced what was kept.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import torch
from torch import Tensor


class Role(IntEnum):
    """What a uniform is used for; each role is an independent stream."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def example_key(example_id: str) -> int:
    """A signed 64-bit key for an example id, the same in every process."""
    digest = hashlib.blake2b(example_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(
    seed: int, keys: Tensor, repeats: Tensor, positions: Tensor, role: Role | Tensor
) -> Tensor:
    """Uniforms in [0, 1) with 53 random bits.

    Args:
        seed: the run's seed.
        keys: int64 (lanes,), `example_key` of each lane's example.
        repeats: int64 (lanes,).
        positions: int64 (lanes, columns), index of the token in the output, from 0.
        role: which stream; a tensor that broadcasts against `positions` gives each its own.

    Returns:
        float64 (lanes, columns).
    """
    state = _mix(keys + _mix(torch.full_like(keys, _signed(seed))))
    state = _mix(state + repeats)[:, None]
    state = _mix(_mix(state + positions) + role)
    return _shift_right(state, 11).double() * 2.0**-53


def _mix(state: Tensor) -> Tensor:
    """SplitMix64: add the golden gamma and finalise. Integer overflow wraps, as intended."""
    state = state + _GOLDEN
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical shift: torch shifts signed integers arithmetically, so the sign bits are cut off."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
