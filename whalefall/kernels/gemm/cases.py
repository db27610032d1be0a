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
            yield normal(t, k, dtype=dtype), *_fp8_tile(n, k)
    # Whole tiles of the products on a GPU, from one row to more than a tile of them.
    for t, k, n in ((1, 256, 64), (9, 512, 128), (33, 384, 64), (130, 128, 192), (2, 128, 8256), (40, 1024, 64)):
        yield normal(t, k, dtype=torch.bfloat16), *_fp8_tile(n, k)
    yield rows_apart(normal(5, 1024, dtype=torch.bfloat16)), *_fp8_tile(64, 1024)


def _fp8_tile(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return fp8_bytes(n, k, seed=1), scale_bytes(-(-n // 32), -(-k // 32), low=112, high=122)


def fp8_tile_groups() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for t, g, k, o in ((0, 2, 32, 4), (1, 1, 32, 16), (9, 4, 33, 31), (3, 2, 128, 64), (35, 3, 256, 128)):
            yield normal(t, g, k, dtype=dtype), *_fp8_tile(g * o, k)
        yield normal(5, 8, 64, dtype=dtype).reshape(5, 4, 128), *_fp8_tile(256, 128)


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
