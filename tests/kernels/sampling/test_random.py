# SPDX-License-Identifier: Apache-2.0
"""The random numbers are what the module's docstring says, and good enough to sample with."""

from __future__ import annotations

import math

import pytest
import torch

from whalefall.kernels import sampling as ops
from whalefall.kernels.sampling.random import Purpose, _as_exponential

M32, M64 = 2**32 - 1, 2**64 - 1


def mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def mix32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & M32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & M32
    return x ^ (x >> 16)


def bits_by_the_book(seed: int, position: int, purpose: int, index: int) -> int:
    """The formula of the docstring in plain integers."""
    key = mix64(mix64((seed + 0x9E3779B97F4A7C15) & M64) ^ (position << 8 | purpose))
    return mix32(mix32((index * 0x9E3779B9 + (key & M32)) & M32) ^ (key >> 32))


@pytest.mark.parametrize("seed", [0, 1, 12345, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("position", [0, 1, 1_048_575])
@pytest.mark.parametrize("purpose", list(Purpose))
def test_bits_follow_the_documented_formula(seed: int, position: int, purpose: Purpose) -> None:
    got_LV = ops.random_bits(torch.tensor([seed]), torch.tensor([position]), int(purpose), 300)
    expected = [bits_by_the_book(seed % 2**64, position, purpose, index) for index in range(300)]
    assert [b % 2**32 for b in got_LV[0].tolist()] == expected


def test_a_row_is_the_same_alone_and_in_a_crowd() -> None:
    seed_L, position_L = torch.arange(9) * 77 - 5, torch.arange(9) + 1000
    crowd_LV = ops.exponential_noise(seed_L, position_L, 0, 1_001)
    for row in range(9):
        assert torch.equal(crowd_LV[row], ops.exponential_noise(seed_L[row : row + 1], position_L[row : row + 1], 0, 1_001)[0])


def test_exponential_is_finite_and_positive_at_the_ends() -> None:
    ends = _as_exponential(torch.tensor([0, -(2**31), 2**31 - 1, -1], dtype=torch.int32))
    assert torch.isfinite(ends.log()).all()
    assert (ends > 0).all()
    assert ends.min() == pytest.approx(2.0**-32, rel=1e-3)  # ids with a tiny share are not starved


@pytest.fixture(scope="module")
def noise() -> torch.Tensor:
    """1,000 rows of 1,000: seeds 0..9 by positions 0..99."""
    seed_L = torch.arange(10).repeat_interleave(100)
    return ops.exponential_noise(seed_L, torch.arange(100).repeat(10), 0, 1_000)


def test_noise_has_the_moments_of_an_exponential(noise: torch.Tensor) -> None:
    x = noise.double()
    n = x.numel()
    assert x.mean().item() == pytest.approx(1.0, abs=5 / math.sqrt(n))
    assert x.var().item() == pytest.approx(1.0, abs=5 * math.sqrt(8 / n))


def test_noise_fills_equal_bins_equally(noise: torch.Tensor) -> None:
    num_bins = 1_000
    counts = torch.bincount(((1 - torch.exp(-noise.double().flatten())) * num_bins).long().clamp(max=num_bins - 1), minlength=num_bins)
    expected = noise.numel() / num_bins
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi2 - (num_bins - 1)) < 5 * math.sqrt(2 * (num_bins - 1))


@pytest.mark.parametrize("what", ["ids", "positions", "seeds", "purposes"])
def test_neighbours_are_uncorrelated(noise: torch.Tensor, what: str) -> None:
    grid = noise.double().unflatten(0, (10, 100)) - 1  # [seed, position, id]
    if what == "ids":
        a, b = grid[..., :-1], grid[..., 1:]
    elif what == "positions":
        a, b = grid[:, :-1], grid[:, 1:]
    elif what == "seeds":
        a, b = grid[:-1], grid[1:]
    else:
        seed_L = torch.arange(10).repeat_interleave(100)
        a, b = grid, ops.exponential_noise(seed_L, torch.arange(100).repeat(10), 1, 1_000).double().unflatten(0, (10, 100)) - 1
    correlation = (a * b).mean().item()
    assert abs(correlation) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("bit", [0, 1, 7, 31, 32, 62])
def test_one_seed_bit_changes_half_of_the_output(bit: int) -> None:
    seed_L, position_L = torch.arange(100), torch.zeros(100, dtype=torch.int64)
    one_LV = ops.random_bits(seed_L, position_L, 0, 100)
    other_LV = ops.random_bits(seed_L ^ (1 << bit), position_L, 0, 100)
    changed = (one_LV ^ other_LV).long() & M32
    share = sum((changed >> b & 1).double().mean().item() for b in range(32)) / 32
    assert share == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(changed.numel() * 32))


@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_draws_have_the_distribution_of_the_softmax(axis: str) -> None:
    num_draws, logits_V = 20_000, torch.tensor([2.0, 0.0, -1.0, 1.0, -math.inf, 0.5, -3.0])
    counter, fixed = torch.arange(num_draws), torch.full((num_draws,), 3)
    seed_L, position_L = (fixed, counter) if axis == "positions" else (counter, fixed)
    ids_L = ops.draw(logits_V.expand(num_draws, -1), seed_L, position_L, 0)
    counts = torch.bincount(ids_L, minlength=7).double()
    expected = logits_V.double().softmax(-1) * num_draws
    assert counts[4] == 0
    alive = expected > 0
    chi2 = ((counts - expected)[alive] ** 2 / expected[alive]).sum().item()
    assert chi2 < 5 + 5 * math.sqrt(2 * 5)  # 5 degrees of freedom
