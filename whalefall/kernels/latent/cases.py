# SPDX-License-Identifier: Apache-2.0
"""Sample inputs of the fused entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from whalefall.kernels.cases import FLOATS, integers, normal, rows_apart


def rotated() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for rounding in range(4):
            yield normal(0, 64, dtype=dtype), *_angles(0, 8), rounding
            yield normal(7, 512, seed=1, dtype=dtype), *_angles(7, 32), rounding
            yield normal(3, 5, 128, seed=2, dtype=dtype), *_angles(3, 32), rounding
        yield rows_apart(normal(4, 32, dtype=dtype)), *_angles(4, 16), 2


def normed() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for rounding in range(4):
            for rows, dim, pairs in ((0, 64, 8), (1, 64, 8), (9, 512, 32), (5, 128, 32)):
                yield 3 * normal(rows, dim, seed=1, dtype=dtype), 1 + 0.1 * normal(dim, seed=2), 1e-20, *_angles(rows, pairs), rounding
        yield rows_apart(normal(4, 64, dtype=dtype)), normal(64, seed=1), 1e-6, *_angles(4, 16), 1


def _angles(tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    theta_TF = integers(tokens, 1, low=0, high=1 << 20) * normal(pairs, seed=9).abs()
    return theta_TF.cos(), theta_TF.sin()
