# SPDX-License-Identifier: Apache-2.0
"""Sample inputs of the n-gram memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from whalefall.kernels.cases import FLOATS, fp8_bytes, integers, normal, rows_apart, scale_bytes


def ids() -> Iterator[tuple[Any, ...]]:
    """The released multipliers and primes of layer 1 (three heads of each size): products reach 2**62."""
    multipliers_K = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
    primes_NJ = torch.tensor([[57, 79, 81], [189, 207, 211], [339, 381, 393]]) + 16_000_000
    offsets_NJ = (primes_NJ.flatten().cumsum(0) - primes_NJ.flatten()).view(3, 3)
    for tokens in (0, 1, 33):
        yield integers(tokens, 4, low=-1, high=99092), 2, multipliers_K, primes_NJ, offsets_NJ
    blocked_TK = torch.tensor([[5, 6, 7, 8], [5, -1, 7, 8], [5, 6, -1, 8], [5, 6, 7, -1], [-1, 6, 7, 8], [-1, -1, -1, -1], [99091] * 4])
    yield blocked_TK, 99091, multipliers_K, primes_NJ, offsets_NJ
    yield integers(5, 2, low=-1, high=50), 0, multipliers_K[:2], primes_NJ[:1], offsets_NJ[:1]


def dense_rows() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for tokens in (0, 1, 9):
            yield normal(50, 32, dtype=dtype), integers(tokens, 6, low=0, high=50), dtype
    yield normal(50, 32), integers(3, 6, low=0, high=50), torch.bfloat16


def fp8_rows() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for tokens, width in ((0, 32), (1, 32), (9, 256)):
            yield fp8_bytes(50, width), scale_bytes(50, width // 32), integers(tokens, 6, low=0, high=50), dtype


def gated() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for tokens, streams, hidden in ((0, 4, 8), (1, 4, 64), (33, 4, 31), (2, 4, 5120)):
            key_value = normal(tokens, streams + 1, hidden, seed=1, dtype=dtype)
            weights = normal(streams, hidden, seed=2), normal(streams, hidden, seed=3)
            yield normal(tokens, streams, hidden, dtype=dtype), key_value[:, :streams], key_value[:, streams], *weights, 1e-20
        # Products near and at zero, of either sign: the floor of 1e-6 shows. Small streams: the eps shows.
        small_TSH = normal(4, 4, 16, dtype=dtype)
        small_TSH[0] = 0
        small_TSH[1] *= 1e-10
        ones_SH = torch.full((4, 16), 1e-4)
        yield small_TSH, rows_apart(normal(4, 4, 16, seed=1, dtype=dtype)), normal(4, 16, seed=4, dtype=dtype), ones_SH, ones_SH, 1e-20
