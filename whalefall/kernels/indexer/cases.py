# SPDX-License-Identifier: Apache-2.0
"""Sample inputs of the indexer.

Queries, weights and keys are small integers: every score is exact in any order of summation, and ties abound. Blocks are scattered; what
no entry of a request occupies holds NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from whalefall.kernels.cases import FLOATS, integers, normal

LENGTHS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 40),),
    ((0, 1), (3, 4), (0, 17), (39, 40)),
    ((0, 40), (38, 39)),
    ((7, 23), (0, 0), (5, 40), (12, 13), (22, 31)),
)
"""Batches of requests; (first, last) row's position of each, ratio 1. Equal numbers are a request without rows."""


def selections() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for requests in LENGTHS:
            for ratio in (1, 2):
                for k in (1, 5, 8, 64):
                    yield *_search(requests, ratio, dtype), k
    yield *_search((), 1, torch.float32), 4  # zero tokens
    yield *_search(((50, 90),), 1, torch.float32, is_real=True), 16


def with_candidates() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for requests in LENGTHS:
            for k, num_blocks, block_size in ((8, 3, 4), (5, 2, 8), (8, 20, 4), (1, 1, 1)):
                yield *_search(requests, 1, dtype), k, num_blocks, block_size
    yield *_search((), 1, torch.float32), 4, 2, 4


def within() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for requests in LENGTHS:
            for k, num_blocks, block_size in ((8, 3, 4), (5, 2, 8), (8, 20, 4), (1, 1, 1)):
                search = _search(requests, 1, dtype)
                yield *search, k, _candidates(search[6], search[7], num_blocks, block_size), block_size
    search = _search((), 1, torch.float32)
    yield *search, 4, torch.empty(0, 2, dtype=torch.int64), 4


def _search(requests: Sequence[tuple[int, int]], ratio: int, dtype: torch.dtype, *, is_real: bool = False) -> tuple[Any, ...]:
    """The arguments up to `max_visible`: blocks of 8 entries, 2 heads of width 4."""
    per_block, heads, width = 8, 2, 4
    positions = [p for first, end in requests for p in range(first, end)]
    request_T = torch.tensor([b for b, (first, end) in enumerate(requests) for _ in range(first, end)], dtype=torch.int64)
    max_visible = max((end for _, end in requests), default=40) // ratio
    columns = -(-max(1, max_visible) // per_block)
    block_table_BP = torch.zeros(len(requests), columns, dtype=torch.int64)
    free = iter(torch.randperm(len(requests) * columns, generator=torch.Generator().manual_seed(2)).tolist())
    keys_RJ = torch.full(((len(requests) * columns + 1) * per_block, width), torch.nan, dtype=dtype)
    for row_P, (_, end) in zip(block_table_BP, requests):
        for p in range(-(-(end // ratio) // per_block)):
            row_P[p] = 1 + next(free)
        for entry in range(end // ratio):
            row = int(row_P[entry // per_block]) * per_block + entry % per_block
            seed = 1000 * row + entry
            keys_RJ[row] = normal(width, seed=seed) if is_real else integers(width, low=-1, high=2, seed=seed).to(dtype)
    tokens = len(positions)
    q_TIJ = normal(tokens, heads, width) if is_real else integers(tokens, heads, width, low=-1, high=2).to(dtype)
    w_TI = normal(tokens, heads, seed=1) if is_real else integers(tokens, heads, low=-1, high=3, seed=1).to(dtype)
    num_visible_T = (torch.tensor(positions, dtype=torch.int64) + 1) // ratio
    return q_TIJ, w_TI, keys_RJ, block_table_BP, per_block, request_T, num_visible_T, max_visible


def _candidates(num_visible_T: torch.Tensor, max_visible: int, num_blocks: int, block_size: int) -> torch.Tensor:
    """Any blocks, rising, the last visible one among them, as the candidate source would publish them."""
    max_blocks = -(-max_visible // block_size)
    out = torch.full((num_visible_T.shape[0], min(num_blocks, max_blocks)), -1)
    for row_M, visible in zip(out, num_visible_T.tolist()):
        blocks = -(-visible // block_size)
        if not blocks:
            continue
        order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(visible))[: out.shape[1] - 1].tolist()
        chosen = sorted([*order, blocks - 1])
        row_M[: len(chosen)] = torch.tensor(chosen)
    return out
