# SPDX-License-Identifier: Apache-2.0
"""Sample inputs of the rotation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from whalefall.kernels.cases import FLOATS, integers, normal, rows_apart


def vectors() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for shape in ((0, 16), (1, 16), (3, 24), (33, 5, 64), (2, 64, 512)):
            for inverse in (False, True):
                yield normal(*shape, seed=1, dtype=dtype), *_angles(shape[0], min(32, shape[-1] // 4)), inverse
        yield rows_apart(normal(7, 32, dtype=dtype)), *_angles(7, 8)
        yield normal(4, 8, dtype=dtype), *_angles(4, 4)  # nothing passes through


def _angles(tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    theta_TF = integers(tokens, 1, low=0, high=1 << 20) * normal(pairs, seed=9).abs()
    return theta_TF.cos(), theta_TF.sin()
