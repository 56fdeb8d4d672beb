"""Which block size and which ratio of workers suit a pair: closed formulas, no simulation."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

LARGEST_BLOCK = 16
_SIDES = 16
"""A ratio is rounded to one of numbers up to this."""


@dataclass(frozen=True)
class Steps:
    """What the parts of a round take for a bank with all its lanes, in seconds."""

    drafter: float
    """One drafted token of every lane, and the token's part of all else that the drafter does."""
    verifier: float
    """One block, whatever its size: where weights bound the time, scoring more tokens is free."""
    transfer: float = 0.0
    """Both ways between the two."""


@dataclass(frozen=True)
class Advice:
    """What would suit the steps best. `gain` is tokens an actor-second over those of the job."""

    block_size: int
    gain: float
    drafters: int
    verifiers: int
    """Drafters : verifiers that keep both busy with the job's own blocks."""


def tokens_per_round(acceptance: float, block_size: int) -> float:
    """Expected tokens that a lane advances by in a round.

    Leviathan et al. (2023), eq. 1: (1 - a^(g+1)) / (1 - a) for g drafted tokens that are each accepted
    with probability a, independently; the last power stands for the token behind a block that is taken
    whole. A bonus that is judged like every other token (`bonus: target`) is drafted as number g + 1,
    and the sum is the same.
    """
    return sum(acceptance**power for power in range(block_size + 1))


def tokens_per_actor_second(steps: Steps, acceptance: float, block_size: int) -> float:
    """Tokens of a lane for each second of a busy actor, drafters and verifiers alike.

    A round takes g drafter steps and one block of the verifier, and workers in the right ratio are all
    busy: (1 - a^(g+1)) / ((1 - a) (g c_d + c_v)), as the walltime improvement of Leviathan et al.
    (2023), Theorem 3.8, but for the constant c_v.
    """
    return tokens_per_round(acceptance, block_size) / (block_size * steps.drafter + steps.verifier)


def best_block_size(steps: Steps, acceptance: float) -> int:
    """The block size with the most tokens an actor-second, up to `LARGEST_BLOCK`."""
    sizes = range(1, LARGEST_BLOCK + 1)
    return max(sizes, key=lambda size: tokens_per_actor_second(steps, acceptance, size))


def advise(steps: Steps, acceptance: float, block_size: int) -> Advice:
    """The best block size, and the ratio that balances the job's.

    A drafter that takes d seconds a round feeds v / d verifiers that take v seconds each.
    """
    best = best_block_size(steps, acceptance)
    given, found = (tokens_per_actor_second(steps, acceptance, size) for size in (block_size, best))
    drafters, verifiers = _ratio(block_size * steps.drafter, steps.verifier)
    return Advice(best, found / given - 1, drafters, verifiers)


def _ratio(drafting: float, verifying: float) -> tuple[int, int]:
    """Two small whole numbers as these two times."""
    if drafting <= verifying:
        ratio = max(Fraction(1, _SIDES), Fraction(drafting / verifying).limit_denominator(_SIDES))
        return ratio.numerator, ratio.denominator
    verifiers, drafters = _ratio(verifying, drafting)
    return drafters, verifiers
