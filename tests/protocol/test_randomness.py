"""Uniforms are SplitMix64 over their key, bit for bit, and every part of the key counts.

Planted faults these tests catch: an arithmetic instead of a logical shift, another order of the
key's parts, the role added without a mix (position t as residual equals t + 1 as acceptance), 52
or 54 bits instead of 53, an example key that changes from process to process.
"""

from __future__ import annotations

import subprocess
import sys

import torch

from pipeline.randomness import Role, example_key, uniforms

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """One output of SplitMix64 (Steele, Lea and Flood, 2014) in Python's integers."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def uniform(seed: int, key: int, repeat: int, position: int, role: int) -> float:
    state = 0
    for part in (seed, key, repeat, position, role):
        state = splitmix64((state + part) & MASK)
    return (state >> 11) * 2.0**-53


def drawn(seed: int, role: Role, lanes: int = 64, columns: int = 256) -> torch.Tensor:
    keys = torch.tensor([example_key(f"lane {lane}") for lane in range(lanes)])
    positions = torch.arange(columns).expand(lanes, columns)
    return uniforms(seed, keys, torch.zeros_like(keys), positions, role)


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])


def test_splitmix64_reference_gives_the_published_outputs() -> None:
    # The first outputs of the published generator for seed 1234567.
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state = (state + 0x9E3779B97F4A7C15) & MASK
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniforms_equal_the_reference_bit_for_bit() -> None:
    keys = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), example_key("a"), example_key("é")])
    repeats = torch.tensor([0, 1, 2, 3, 0, 7, 100])
    positions = torch.tensor([[0, 1, 2, 500, 2**31]]).expand(len(keys), 5) + repeats[:, None]
    for seed in (0, 1, 42, -3, 2**63, 2**64 - 1):
        for role in Role:
            got = uniforms(seed, keys, repeats, positions, role)
            expected = [
                [uniform(seed, int(key), int(repeat), int(t), role) for t in row]
                for key, repeat, row in zip(keys, repeats, positions, strict=True)
            ]
            assert got.dtype == torch.float64
            assert got.tolist() == expected


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    values = drawn(seed=0, role=Role.DRAFT)
    assert values.min() >= 0
    assert values.max() < 1
    # Kolmogorov-Smirnov at a false-alarm rate of 1e-6 (the seed is fixed): D < 2.7 / sqrt(n).
    ordered = values.flatten().sort().values
    steps = torch.arange(len(ordered) + 1) / len(ordered)
    distance = torch.maximum(steps[1:] - ordered, ordered - steps[:-1]).max()
    assert distance < 2.7 / len(ordered) ** 0.5
    assert (values * 2**53 % 2 == 1).double().mean() > 0.4, "the 53rd bit is not random"


def test_roles_positions_repeats_seeds_and_examples_are_independent_streams() -> None:
    base = drawn(seed=0, role=Role.DRAFT)
    others = {role.name: drawn(seed=0, role=role) for role in Role if role is not Role.DRAFT}
    others["seed"] = drawn(seed=1, role=Role.DRAFT)
    others["position"] = base.roll(1, dims=1)
    others["example"] = base.roll(1, dims=0)
    keys = torch.tensor([example_key(f"lane {lane}") for lane in range(64)])
    positions = torch.arange(256).expand(64, 256)
    others["repeat"] = uniforms(0, keys, torch.ones_like(keys), positions, Role.DRAFT)
    for name, values in others.items():
        # 16384 pairs: five standard deviations of a correlation are 0.04.
        assert abs(correlation(base, values)) < 0.04, name
        assert (base == values).sum() == 0, name


def test_no_uniform_is_used_in_two_places() -> None:
    keys = torch.tensor([example_key(str(lane)) for lane in range(20)])
    positions = torch.arange(60).expand(20, 60)
    values = [
        uniforms(seed, keys, torch.full_like(keys, repeat), positions, role)
        for seed in (0, 1)
        for repeat in (0, 1)
        for role in Role
    ]
    everything = torch.stack(values).flatten()
    assert len(everything.unique()) == len(everything)


def test_a_uniform_depends_on_its_own_key_alone() -> None:
    """Neither the other lanes of the batch nor the other columns of the block matter."""
    keys = torch.tensor([example_key(str(lane)) for lane in range(5)])
    repeats = torch.arange(5)
    positions = torch.arange(8) + torch.arange(5)[:, None]
    together = uniforms(3, keys, repeats, positions, Role.ACCEPT)
    for lane in range(5):
        one = slice(lane, lane + 1)
        alone = uniforms(3, keys[one], repeats[one], positions[one, 4:5], Role.ACCEPT)
        assert alone.item() == together[lane, 4]


def test_an_example_key_is_the_same_in_every_process() -> None:
    code = "from pipeline.randomness import example_key; print(example_key('row 17'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == example_key("row 17") == -6070095603008061725


def test_example_keys_tell_ids_apart_and_take_any_text() -> None:
    ids = [str(number) for number in range(2000)] + ["", "é", "e\u0301", "\ud800", "a" * 5000]
    assert len({example_key(text) for text in ids}) == len(ids)
    assert all(-(2**63) <= example_key(text) < 2**63 for text in ids)
