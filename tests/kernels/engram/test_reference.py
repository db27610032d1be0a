# SPDX-License-Identifier: Apache-2.0
"""N-gram hashes with plain integers, blocked look-back, and the gate at zero."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from whalefall.kernels import engram
from whalefall.kernels.cases import normal

MULTIPLIERS = [67716810739261, 51510806800915, 30921347202721, 82619226485591]  # layer 14 of the released model
PRIMES = [[16_000_477, 16_000_487], [16_000_667, 16_000_669], [16_000_781, 16_000_799]]


def rows_of(ids: list[int], pad: int = 2) -> list[int]:
    primes_NJ = torch.tensor(PRIMES)
    offsets_NJ = (primes_NJ.flatten().cumsum(0) - primes_NJ.flatten()).view(3, 2)
    return engram.hash_rows(torch.tensor([ids]), pad, torch.tensor(MULTIPLIERS), primes_NJ, offsets_NJ)[0].tolist()


def test_rows_are_the_xor_of_products_modulo_each_prime() -> None:
    ids = [99091, 5, 77777, 99091]
    a, b, c, d = (i * m for i, m in zip(ids, MULTIPLIERS))
    flat = [p for pair in PRIMES for p in pair]
    hashes = [a ^ b, a ^ b, a ^ b ^ c, a ^ b ^ c, a ^ b ^ c ^ d, a ^ b ^ c ^ d]
    assert max(hashes) < 2**63
    assert rows_of(ids) == [h % p + sum(flat[:i]) for i, (h, p) in enumerate(zip(hashes, flat))]


@pytest.mark.parametrize(
    ("ids", "as_if"),
    [([7, 8, 9, -1], [7, 8, 9, 2]), ([7, 8, -1, 9], [7, 8, 2, 2]), ([7, -1, 8, 9], [7, 2, 2, 2]), ([-1, 7, 8, 9], [2] * 4)],
)
def test_once_blocked_all_that_lies_farther_is_blocked(ids: list[int], as_if: list[int]) -> None:
    assert rows_of(ids) == rows_of(as_if)


def test_slots_never_share_a_row() -> None:
    flat = [p for pair in PRIMES for p in pair]
    for ids in ([0, 0, 0, 0], [99091] * 4, [1, 2, 3, 4]):
        for i, row in enumerate(rows_of(ids)):
            assert sum(flat[:i]) <= row < sum(flat[: i + 1])


def gate_of(d_sign: Tensor, size: float) -> float:
    """The gate that a product of this sign and size gives, read off a value of one."""
    hidden = 16
    streams_TSH = torch.ones(1, 1, hidden)
    keys_TSH = d_sign * torch.ones(1, 1, hidden)
    weight_SH = torch.full((1, hidden), size / hidden**0.5)  # d = hidden * weight * hidden**-0.5
    out = engram.inject(streams_TSH, keys_TSH, torch.ones(1, hidden), weight_SH, torch.ones(1, hidden), 1e-20)
    return float(out[0, 0, 0]) - 1


@pytest.mark.parametrize("size", [4.0, 1e-2, 1e-6, 1e-8, 0.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_gate_is_the_sigmoid_of_the_signed_root_with_a_floor(size: float, sign: float) -> None:
    if size == 0.0:
        sign = 1.0  # a sum of zeros is +0
    expected = 1 / (1 + math.exp(-sign * math.sqrt(max(size, 1e-6))))
    assert gate_of(torch.tensor(sign), size) == pytest.approx(expected, abs=1e-6)


def test_the_floor_of_1e_6_shows_at_zero() -> None:
    assert gate_of(torch.tensor(1.0), 0.0) == pytest.approx(0.50025, abs=1e-6)
    assert gate_of(torch.tensor(-1.0), 1e-9) == pytest.approx(0.49975, abs=1e-6)


def test_streams_of_zeros_take_half_of_the_value() -> None:
    value_TH = normal(2, 16)
    out = engram.inject(torch.zeros(2, 4, 16), normal(2, 4, 16, seed=1), value_TH, torch.ones(4, 16), torch.ones(4, 16), 1e-20)
    assert out.isfinite().all()
    assert torch.allclose(out, 0.5 * value_TH[:, None].expand(-1, 4, -1), atol=2e-3)


def test_every_stream_has_its_own_weights() -> None:
    streams_TSH, keys_TSH = torch.ones(1, 2, 16), torch.ones(1, 2, 16)
    q_weight_SH = torch.stack((torch.ones(16), -torch.ones(16)))
    out = engram.inject(streams_TSH, keys_TSH, torch.ones(1, 16), q_weight_SH, torch.ones(2, 16), 1e-20)
    gates = (out - 1)[0, :, 0].tolist()
    assert gates[0] == pytest.approx(1 / (1 + math.exp(-2.0)))  # d = 16 / 4
    assert gates[1] == pytest.approx(1 / (1 + math.exp(2.0)))
