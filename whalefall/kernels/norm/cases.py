# SPDX-License-Identifier: Apache-2.0
"""Sample inputs of the norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from whalefall.kernels.cases import FLOATS, normal, rows_apart


def rows_by_hidden() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for rows, hidden in ((0, 8), (1, 1), (1, 64), (31, 33), (33, 127), (3, 5120)):
            yield normal(rows, hidden, seed=rows, dtype=dtype), 1 + 0.1 * normal(hidden, seed=1), 1e-20
        yield rows_apart(normal(5, 64, dtype=dtype)), normal(64, seed=1), 1e-6
        # Rows so small that the eps is most of the mean, and a row of zeros.
        for eps in (1e-20, 1e-6):
            sizes_T1 = normal(4, 1).sign() * (eps**0.5) * normal(4, 1, seed=2).abs()
            sizes_T1[2] = 0
            yield (normal(4, 64, seed=3) * sizes_T1).to(dtype), normal(64, seed=1), eps
