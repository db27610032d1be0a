# SPDX-License-Identifier: Apache-2.0
"""The indexer on a GPU: scores by a kernel that reads the paged keys in place, then the reference's exact selection over them.

A program scores some entries for one token, all heads in one product; entries that the token cannot see cost an early return. Nothing here
depends on what is on the device: grids and buffers follow shapes and `max_visible`, so that a step can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.indexer.reference import (
    all_visible,
    select,
    select_from,
    select_from_with_candidates,
    select_from_within,
    select_with_candidates,
    select_within,
)
from whalefall.kernels.registry import Device
from whalefall.kernels.triton_math import INTERPRETED

ENTRY_TILE = 128
MAX_SCORES = 1 << 26
"""Scores held at once (float32): 256 MiB."""
GPU = Device(sm=80)


@select.impl("triton", needs=GPU)
def select_triton(
    q_TIJ: Tensor,
    w_TI: Tensor,
    key_pool_RJ: Tensor,
    block_table_BP: Tensor,
    entries_per_block: int,
    request_T: Tensor,
    num_visible_T: Tensor,
    max_visible: int,
    k: int,
) -> Tensor:
    if max_visible <= k:
        return all_visible(num_visible_T, max_visible)
    tiles = _scores(q_TIJ, w_TI, key_pool_RJ, block_table_BP, entries_per_block, request_T, num_visible_T, max_visible)
    return select_from(tiles, num_visible_T, k)


@select_with_candidates.impl("triton", needs=GPU)
def select_with_candidates_triton(
    q_TIJ: Tensor,
    w_TI: Tensor,
    key_pool_RJ: Tensor,
    block_table_BP: Tensor,
    entries_per_block: int,
    request_T: Tensor,
    num_visible_T: Tensor,
    max_visible: int,
    k: int,
    num_blocks: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    max_blocks = -(-max_visible // block_size)
    search = (q_TIJ, w_TI, key_pool_RJ, block_table_BP, entries_per_block, request_T, num_visible_T, max_visible)
    if max_blocks <= num_blocks:
        return select_triton(*search, k), all_visible(-(-num_visible_T // block_size), max_blocks)
    return select_from_with_candidates(_scores(*search), num_visible_T, max_visible, k, num_blocks, block_size)


@select_within.impl("triton", needs=GPU)
def select_within_triton(
    q_TIJ: Tensor,
    w_TI: Tensor,
    key_pool_RJ: Tensor,
    block_table_BP: Tensor,
    entries_per_block: int,
    request_T: Tensor,
    num_visible_T: Tensor,
    max_visible: int,
    k: int,
    candidates_TM: Tensor,
    block_size: int,
) -> Tensor:
    search = (q_TIJ, w_TI, key_pool_RJ, block_table_BP, entries_per_block, request_T, num_visible_T, max_visible)
    if max_visible <= k or candidates_TM.shape[1] * block_size >= max_visible:
        return select_triton(*search, k)
    return select_from_within(_scores(*search), num_visible_T, max_visible, k, candidates_TM, block_size)


def _scores(
    q_TIJ: Tensor,
    w_TI: Tensor,
    key_pool_RJ: Tensor,
    block_table_BP: Tensor,
    entries_per_block: int,
    request_T: Tensor,
    num_visible_T: Tensor,
    max_visible: int,
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, float32 scores [rows, max_visible]), as many rows at a time as MAX_SCORES allows."""
    tokens, heads, width = q_TIJ.shape
    q_TIJ, w_TI = q_TIJ.contiguous(), w_TI.contiguous()
    rows = max(1, MAX_SCORES // max_visible)
    for begin in range(0, tokens, rows):
        count = min(rows, tokens - begin)
        score_tC = torch.empty(count, max_visible, dtype=torch.float32, device=q_TIJ.device)
        _scores_kernel[(count, -(-max_visible // ENTRY_TILE))](
            q_TIJ, w_TI, key_pool_RJ, block_table_BP, request_T, num_visible_T, score_tC,
            begin, heads, width, entries_per_block, max_visible, block_table_BP.stride(0), key_pool_RJ.stride(0),
            HEADS=max(16, triton.next_power_of_2(heads)), WIDTH=max(16, triton.next_power_of_2(width)), ENTRIES=ENTRY_TILE, num_warps=4,
        )  # fmt: skip
        yield slice(begin, begin + count), score_tC


@triton.jit
def _scores_kernel(
    q_ptr, w_ptr, key_ptr, table_ptr, request_ptr, visible_ptr, score_ptr,
    begin, heads, width, per_block, max_visible, table_stride, key_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    token = line + begin
    first = tl.program_id(1) * ENTRIES
    visible = tl.load(visible_ptr + token)
    if first < visible:
        entry = first + tl.arange(0, ENTRIES)
        is_visible = entry < visible
        request = tl.load(request_ptr + token)
        block = tl.load(table_ptr + request * table_stride + entry // per_block, mask=is_visible, other=0)
        row = block * per_block + entry % per_block
        head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
        is_head, is_column = head < heads, column < width
        key = tl.load(key_ptr + row[:, None] * key_stride + column[None, :], mask=is_visible[:, None] & is_column[None, :], other=0.0)
        q = tl.load(
            q_ptr + (token * heads + head)[None, :] * width + column[:, None], mask=is_head[None, :] & is_column[:, None], other=0.0
        )
        w = tl.load(w_ptr + token * heads + head, mask=is_head, other=0.0).to(tl.float32)
        if INTERPRETED:
            product = tl.dot(key.to(tl.float32), q.to(tl.float32))
        else:
            product = tl.dot(key, q.to(key.dtype), input_precision="ieee")
        score = tl.sum(tl.maximum(product, 0.0) * w[None, :], 1)
        tl.store(score_ptr + line * max_visible + entry, score, mask=entry < max_visible)
