# SPDX-License-Identifier: Apache-2.0
"""Sample inputs of the pooling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from whalefall.kernels.cases import normal, rows_apart


def pooled() -> Iterator[tuple[Any, ...]]:
    for tokens, ratio, dim in ((0, 2, 8), (1, 2, 64), (33, 2, 31), (5, 1, 16), (7, 4, 512)):
        yield normal(tokens, ratio, dim), normal(tokens, ratio, dim, seed=1)
    yield normal(3, 2, 16), 80 * normal(3, 2, 16, seed=1)  # one token takes all
    pair_TrD = rows_apart(normal(6, 2, 32, seed=2))
    yield pair_TrD[..., :16], pair_TrD[..., 16:]
