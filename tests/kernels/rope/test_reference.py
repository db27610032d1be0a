# SPDX-License-Identifier: Apache-2.0
"""Rotation against complex numbers, and the two frequency tables against the design note's printed facts."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from whalefall.kernels.cases import normal
from whalefall.kernels.rope import angles, plain_frequencies, rotate, yarn_frequencies


def released_yarn() -> torch.Tensor:
    return yarn_frequencies(64, 160000, factor=16, original_max=65536, beta_fast=32, beta_slow=1)


def test_pairs_are_neighbours_and_turn_as_complex_numbers() -> None:
    x_TD = normal(3, 24)
    positions = [0, 1, 1000]
    frequencies = plain_frequencies(16, 10000)
    turned = rotate(x_TD, *angles(torch.tensor(positions), frequencies))
    assert torch.equal(turned[:, :8], x_TD[:, :8])
    for t, p in enumerate(positions):
        for i in range(8):
            z = complex(x_TD[t, 8 + 2 * i], x_TD[t, 9 + 2 * i]) * cmath.exp(1j * p * 10000 ** (-2 * i / 16))
            assert turned[t, 8 + 2 * i : 10 + 2 * i].tolist() == pytest.approx([z.real, z.imag], abs=2e-4)


def test_the_inverse_turns_back() -> None:
    x_TND = normal(5, 3, 32)
    turn = angles(torch.arange(5) * 977, plain_frequencies(32, 10000))
    back = rotate(rotate(x_TND, *turn), *turn, inverse=True)
    assert torch.allclose(back, x_TND, atol=1e-6)
    assert not torch.allclose(rotate(x_TND, *turn), x_TND, atol=1e-2)


def test_products_depend_on_the_distance_only() -> None:
    q, k = normal(1, 32), normal(1, 32, seed=1)
    frequencies = plain_frequencies(32, 10000)

    def product(p: int, j: int) -> float:
        return float((rotate(q, *angles(torch.tensor([p]), frequencies)) * rotate(k, *angles(torch.tensor([j]), frequencies))).sum())

    assert product(105, 100) == pytest.approx(product(7, 2), abs=1e-4)
    assert product(105, 100) != pytest.approx(product(7, 3), abs=1e-2)


def test_bfloat16_is_rounded_once() -> None:
    x = normal(4, 16, dtype=torch.bfloat16)
    turn = angles(torch.arange(4), plain_frequencies(16, 10000))
    assert torch.equal(rotate(x, *turn), rotate(x.float(), *turn).bfloat16())


def test_yarn_ramps_from_dim_15_to_25_in_the_released_config() -> None:
    ratio = released_yarn() / plain_frequencies(64, 160000)
    assert torch.equal(ratio[:16], torch.ones(16))  # low = 15 keeps its frequency
    assert torch.allclose(ratio[25:], torch.full((7,), 1 / 16))  # high = 25 is slowed in full
    assert ((ratio[16:25] < 1) & (ratio[16:25] > 1 / 16)).all()
    expected = [1 - (i - 15) / 10 * (1 - 1 / 16) for i in range(15, 26)]
    assert ratio[15:26].tolist() == pytest.approx(expected, abs=1e-6)


def test_yarn_clamps_the_ramp_of_a_small_model() -> None:
    """The tiny configuration of the note: low = 0 (clamped), high = 2."""
    ratio = yarn_frequencies(16, 160000, factor=16, original_max=64, beta_fast=32, beta_slow=1) / plain_frequencies(16, 160000)
    assert ratio.tolist() == pytest.approx([1, (1 + 1 / 16) / 2, *[1 / 16] * 6])


def test_yarn_with_an_empty_ramp_is_a_step() -> None:
    ratio = yarn_frequencies(16, 160000, factor=4, original_max=6, beta_fast=1, beta_slow=1) / plain_frequencies(16, 160000)
    assert ratio.isfinite().all()
    assert ratio.tolist() == pytest.approx([1, *[0.25] * 7])


def test_frequencies_fall_from_one() -> None:
    frequencies = plain_frequencies(64, 10000)
    assert frequencies[0] == 1
    assert frequencies.tolist() == pytest.approx([math.exp(-2 * i / 64 * math.log(10000)) for i in range(32)], rel=1e-6)
