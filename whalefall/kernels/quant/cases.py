# SPDX-License-Identifier: Apache-2.0
"""Sample inputs of the number formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from whalefall.kernels.cases import FLOATS, fp4_bytes, fp8_bytes, normal, rows_apart, scale_bytes


def tiles() -> Iterator[tuple[Any, ...]]:
    for n, k in ((32, 32), (1, 1), (31, 33), (65, 96), (512, 1280)):
        for dtype in FLOATS:
            yield fp8_bytes(n, k), scale_bytes(-(-n // 32), -(-k // 32), seed=1), dtype
    yield rows_apart(fp8_bytes(33, 64)), scale_bytes(2, 2), torch.float32


def fp8_rows() -> Iterator[tuple[Any, ...]]:
    for rows, columns in ((0, 32), (1, 32), (7, 256), (1000, 64)):
        for dtype in FLOATS:
            yield fp8_bytes(rows, columns), scale_bytes(rows, columns // 32, seed=1), dtype


def fp4_rows() -> Iterator[tuple[Any, ...]]:
    for rows, columns in ((1, 32), (33, 64), (2304, 128)):
        for dtype in FLOATS:
            yield fp4_bytes(rows, columns // 2), scale_bytes(rows, columns // 32, seed=1), dtype


def caches() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for rows, columns in ((0, 32), (1, 32), (3, 64), (33, 512)):
            yield (normal(rows, columns, seed=rows, dtype=dtype),)
        yield (edges(64).to(dtype),)
        yield (rows_apart(normal(5, 96, seed=2, dtype=dtype)),)
        yield (normal(4, 3, 64, seed=3, dtype=dtype),)  # queries have heads


def edges(columns: int) -> Tensor:
    """Rows whose largest entry sits on or beside a change of scale, all-zero rows, tiny and huge rows, midpoints."""
    largest = [448.0, 6.0, 1.0, 0.0, 1e-4, 9e-5, 1e-30, 3e30, 7.0, 449.0, 2.0**-9 * 6, 2.0**-10 * 6, 448 * 6.0, 1e5]
    beside = [torch.tensor(v).nextafter(torch.tensor(way)).item() for v in largest[:3] for way in (0.0, 1e9)]
    ramp_D = torch.linspace(-1, 1, columns)
    rows = torch.tensor([*largest, *beside])[:, None] * ramp_D
    midpoints_D = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(columns // 8)
    return torch.cat((rows, midpoints_D[None], -midpoints_D[None]))
