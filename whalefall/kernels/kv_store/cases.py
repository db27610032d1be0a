# SPDX-License-Identifier: Apache-2.0
"""Sample inputs of the cache writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from whalefall.kernels.cases import FLOATS, normal, rows_apart


def writes() -> Iterator[tuple[Any, ...]]:
    for pool_dtype in FLOATS:
        for dtype in FLOATS:
            for rows, tokens, dim in ((4, 0, 8), (5, 1, 8), (40, 17, 33), (64, 64, 512)):
                order_T = torch.randperm(rows, generator=torch.Generator().manual_seed(3))[:tokens]
                yield normal(rows, dim, dtype=pool_dtype), order_T, normal(tokens, dim, seed=1, dtype=dtype)
    yield normal(9, 16), torch.tensor([8, 0, 3]), rows_apart(normal(3, 16, seed=1))
