# SPDX-License-Identifier: Apache-2.0
"""Sample inputs of the hyper-connections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from whalefall.kernels.cases import FLOATS, normal, rows_apart

_SHAPES = ((0, 4, 8), (1, 4, 64), (33, 4, 31), (5, 2, 16), (2, 4, 5120))
"""(T, S, H)."""


def mixed() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for t, s, h in _SHAPES:
            yield normal(t, s, h, dtype=dtype), *_parameters(s, h), 1e-20, 1e-6, 20
        # An eps that shows, a single round, rows of zeros, and streams as the embedding expands them.
        yield normal(3, 4, 16, dtype=dtype), *_parameters(4, 16), 0.5, 0.1, 3
        yield 1e-10 * normal(3, 4, 16, dtype=dtype), *_parameters(4, 16), 1e-20, 1e-6, 1
        yield torch.zeros(2, 4, 16, dtype=dtype), *_parameters(4, 16), 1e-20, 1e-6, 20
        yield normal(3, 1, 16, dtype=dtype).expand(-1, 4, -1), *_parameters(4, 16), 1e-20, 1e-6, 20


def collapsed() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for t, s, h in _SHAPES:
            yield normal(t, s, h, dtype=dtype), normal(t, s, seed=1)
        yield rows_apart(normal(4, 4, 32, dtype=dtype)), torch.eye(4)
        yield normal(3, 1, 16, dtype=dtype).expand(-1, 4, -1), normal(3, 4, seed=1)


def expanded() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for t, s, h in _SHAPES:
            yield normal(t, s, h, dtype=dtype), normal(t, h, seed=1, dtype=dtype), normal(t, s, seed=2), normal(t, s, s, seed=3)
        yield normal(3, 1, 16, dtype=dtype).expand(-1, 4, -1), normal(3, 16, dtype=dtype), normal(3, 4), normal(3, 4, 4, seed=3)


def _parameters(streams: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """fn, base and scale; lively enough that no branch is near its middle."""
    rows = streams * (2 + streams)
    return normal(rows, streams * hidden, seed=4) / hidden**0.5, normal(rows, seed=5), torch.tensor([0.5, 1.5, 1.0])
