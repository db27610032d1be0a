# SPDX-License-Identifier: Apache-2.0
"""Sample inputs of the sparse attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from whalefall.kernels.cases import FLOATS, integers, normal, rows_apart


def gathered() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        # (T, N, D, rows, W, K); K = 0 is the first step of a compressed layer, None a layer without entries
        for t, n, d, rows, window, k in (
            (0, 2, 8, 9, 4, 3),
            (1, 1, 16, 3, 1, None),
            (5, 3, 16, 20, 4, 0),
            (17, 4, 32, 64, 16, 15),
            (9, 2, 64, 40, 17, None),
            (2, 64, 512, 300, 128, 512),
        ):
            yield _arguments(t, n, d, rows, window, k, dtype)
        q_TND, window_kv_MD, _, main_kv_CD, _, sink_N, scale = _arguments(4, 2, 16, 12, 4, 6, dtype)
        first_TW = torch.arange(1, 5).expand(4, 4)
        none_TW, none_TK = torch.full((4, 4), -1), torch.full((4, 6), -1)
        yield q_TND, window_kv_MD, none_TW, main_kv_CD, none_TK, sink_N, scale  # no key at all
        yield 30 * q_TND, window_kv_MD, first_TW, main_kv_CD, none_TK, sink_N, scale  # large logits
        yield q_TND, window_kv_MD, first_TW, main_kv_CD, none_TK, 40 * sink_N, scale  # sinks that take all or nothing


def _arguments(t: int, n: int, d: int, rows: int, window: int, k: int | None, dtype: torch.dtype) -> tuple[Any, ...]:
    main = (None, None) if k is None else (_pool(rows, d, 2, dtype), _index(t, k, rows, 3))
    window_kv_MD = rows_apart(_pool(rows, d, 1, dtype))
    return normal(t, n, d, dtype=dtype), window_kv_MD, _index(t, window, rows, 4), *main, normal(n, seed=5), d**-0.5


def _pool(rows: int, d: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Row 0, which absent keys might be taken from, and the last one, which nothing points to, hold NaN and infinity."""
    pool = normal(rows, d, seed=seed, dtype=dtype)
    pool[0], pool[-1] = torch.nan, torch.inf
    return pool


def _index(t: int, k: int, rows: int, seed: int) -> Tensor:
    """About a third absent, or more where rows are few; never row 0 or the last one, and no row twice."""
    order = normal(t, rows - 2, seed=seed).argsort(1) + 1
    index = torch.cat((order, torch.full((t, max(0, k - order.shape[1])), -1)), dim=1)[:, :k]
    return torch.where(integers(t, k, low=0, high=3, seed=seed + 1) == 0, -1, index)
