# SPDX-License-Identifier: Apache-2.0
"""Sample inputs of the matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from whalefall.kernels.cases import FLOATS, fp8_bytes, normal, rows_apart, scale_bytes

_SHAPES = ((0, 32, 16), (1, 32, 16), (15, 33, 31), (17, 64, 65), (5, 1280, 96))
"""(T, K, N)."""


def dense() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for t, k, n in _SHAPES:
            yield normal(t, k, dtype=dtype), normal(n, k, seed=1, dtype=dtype)
        yield rows_apart(normal(9, 64, dtype=dtype)), rows_apart(normal(40, 64, seed=1, dtype=dtype))


def fp8_tiles() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for t, k, n in (*_SHAPES, (3, 40, 48)):
            yield normal(t, k, dtype=dtype), fp8_bytes(n, k, seed=1), scale_bytes(-(-n // 32), -(-k // 32), low=112, high=122)


def float32_results() -> Iterator[tuple[Any, ...]]:
    for x_dtype in FLOATS:
        for w_dtype in FLOATS:
            for t, k, n in _SHAPES:
                yield normal(t, k, dtype=x_dtype), normal(n, k, seed=1, dtype=w_dtype)


def groups() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for t, g, k, n in ((0, 2, 8, 4), (1, 1, 32, 16), (9, 4, 33, 31), (3, 8, 256, 64)):
            yield normal(t, g, k, dtype=dtype), normal(g, n, k, seed=1, dtype=dtype)
        heads_TND = normal(5, 8, 16, dtype=dtype)
        yield heads_TND.reshape(5, 2, -1), torch.stack([normal(24, 64, seed=s, dtype=dtype) for s in (1, 2)], dim=1).transpose(0, 1)
