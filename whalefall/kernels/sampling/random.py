# SPDX-License-Identifier: Apache-2.0
"""Counter-based random numbers: a pure function of (seed, position, purpose, vocabulary index).

There is no generator with a state, so a draw is the same alone or in a crowd, after a preemption, one step ahead or not, and on every
rank. All mixing is wrapping integer arithmetic and therefore equal on every device:

    key     = mix64(mix64(seed + G) ^ (position << 8 | purpose))                 one 64-bit key per row; G = 0x9E3779B97F4A7C15
    bits[v] = mix32(mix32(v * 0x9E3779B9 + low32(key)) ^ high32(key))            one 32-bit word per id
    E[v]    = -log1p(-u),  u = ((bits[v] mod 2^31) + 1/2) / 2^31                 exponential with mean 1

mix64 is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators"), mix32 is a bijective
multiply-xorshift hash with low bias (Wellons' "lowbias32"). The second mix32 keeps rows whose low key words are close unrelated.
u near 0 has a resolution of 2^-32, so even ids with a share of 1e-9 are drawn as often as they should be.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from whalefall.kernels.registry import op


class Purpose(IntEnum):
    """What a draw at a position is for; each purpose has a stream of its own."""

    TARGET = 0
    """A token from the target model's distribution."""
    ACCEPT = 1
    """Whether a drafted token is accepted."""
    RESIDUAL = 2
    """A token in place of a refused draft."""
    DRAFT = 3
    """A drafted token."""


def _signed(word: int, bits: int) -> int:
    return word - (1 << bits) if word >> (bits - 1) else word


_GOLDEN_64 = _signed(0x9E3779B97F4A7C15, 64)
_MIX_64 = (_signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64))
_GOLDEN_32 = _signed(0x9E3779B9, 32)
_MIX_32 = (_signed(0x7FEB352D, 32), _signed(0x846CA68B, 32))


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_64[0]  # the mask turns torch's arithmetic shift into a logical one
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_64[1]
    return x ^ ((x >> 31) & (2**33 - 1))


def _mix32(x: Tensor) -> Tensor:
    """In place: these tensors are as large as the logits."""
    x ^= (x >> 16) & 0xFFFF
    x *= _MIX_32[0]
    x ^= (x >> 15) & 0x1FFFF
    x *= _MIX_32[1]
    x ^= (x >> 16) & 0xFFFF
    return x


def _cases() -> Iterator[tuple[Any, ...]]:
    edges_L = torch.tensor([0, 1, -1, 2**62, -(2**63), 12345], dtype=torch.int64)
    for num_rows, vocab_size in ((0, 5), (1, 1), (6, 7), (6, 1025), (2, 129_280)):
        for purpose in (Purpose.TARGET, Purpose.DRAFT):
            yield edges_L[:num_rows], edges_L.abs()[:num_rows] % 2**20, int(purpose), vocab_size


@op("sampling.random_bits", cases=_cases)
def random_bits(seed_L: Tensor, position_L: Tensor, purpose: int, vocab_size: int) -> Tensor:
    """32 random bits per row and vocabulary index.

    Args:
        seed_L: int64, the request's seed (its 64 bits, read as signed).
        position_L: int64 absolute position of the token to draw, below 2^55.
        purpose: a `Purpose`.
    Returns:
        int32 [L, V]; all bits random, the sign bit too.
    Numerics: exact.
    """
    key_L = _mix64(_mix64(seed_L + _GOLDEN_64) ^ ((position_L << 8) | purpose))
    low_L = key_L.to(torch.int32)  # conversion keeps the low word
    high_L = (key_L >> 32).to(torch.int32)
    id_V = torch.arange(vocab_size, dtype=torch.int32, device=seed_L.device) * _GOLDEN_32
    bits_LV = _mix32(id_V + low_L[:, None])
    bits_LV ^= high_L[:, None]
    return _mix32(bits_LV)


@op("sampling.exponential_noise", cases=_cases)
def exponential_noise(seed_L: Tensor, position_L: Tensor, purpose: int, vocab_size: int) -> Tensor:
    """Exponential numbers with mean 1, float32 [L, V], in [2.3e-10, 16.7]: never 0 and never infinite, so their logarithm is finite."""
    return _as_exponential(random_bits(seed_L, position_L, purpose, vocab_size))


def _as_exponential(bits_LV: Tensor) -> Tensor:
    uniform_LV = (bits_LV & 0x7FFF_FFFF).float().add_(0.5).mul_(2.0**-31)
    uniform_LV.clamp_(max=1 - 2.0**-24)  # the largest float below 1; float32 rounding would give 1 and an infinite result
    return uniform_LV.neg_().log1p_().neg_()
