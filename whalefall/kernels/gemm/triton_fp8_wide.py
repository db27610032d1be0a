# SPDX-License-Identifier: Apache-2.0
"""Products with FP8 tile weights for some dozens to hundreds of rows: bytes and arithmetic both count.

A first launch brings each row to float16 (times a power of two, so that nothing overflows) and its columns into the order in which the
matrix units take packed bytes. Weights become float16 in registers, with scales relative to the largest of their row of tiles. Where there
are few tiles, programs share a tile's columns; the last one to finish adds up the sums in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.quant.unpack import E4M3_SCALED_RESTORE, e4m3_scaled_factor, in_places, places, unpack_e4m3_scaled
from whalefall.kernels.triton_math import dot, narrow, power_of_two

_MAX_TILES = 264
"""Programs up to which tiles are shared: two a multiprocessor."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a product is cut: tokens, weight rows, columns a step; programs that share a tile; warps and stages."""

    tokens: int
    rows: int
    columns: int
    splits: int
    warps: int
    stages: int


def shape_for(tokens: int, n: int, k: int) -> Shape:
    block_t, columns = (64, 128) if tokens <= 64 else (128, 64)
    tiles, steps = (n // 64) * triton.cdiv(tokens, block_t), k // columns
    splits = max((s for s in range(1, k // 512 + 1) if steps % s == 0 and tiles * s <= _MAX_TILES), default=1)
    return Shape(block_t, 64, columns, splits, 4, 3)


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counters_on(device: torch.device) -> Tensor:
    """int32 zeros, one set a stream: programs count there who is done with a tile, and the last one sets it back to zero."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if (device, stream) not in _counters:
        _counters[device, stream] = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
    return _counters[device, stream]


def linear_wide(x: Tensor, w_NK: Tensor, scale_nk: Tensor, out_TN: Tensor, groups: int, token_stride: int, group_stride: int) -> None:
    """out[t, n] = sum over k of w[n, k] x[t, n // (N / groups), k]; n of whole 64 rows a group, k of whole 128 columns."""
    (tokens, n), k, device = out_TN.shape, w_NK.shape[1], x.device
    half_TGK = torch.empty(tokens, groups, k, dtype=torch.float16, device=device)
    factor_TG = torch.empty(tokens, groups, dtype=torch.float32, device=device)
    columns = min(2048, triton.next_power_of_2(k))
    _halve_kernel[(tokens, groups)](x, half_TGK, factor_TG, token_stride, group_stride, K=k, COLUMNS=columns, num_warps=4)
    shape = shape_for(tokens, n, k)
    grid = (n // shape.rows, triton.cdiv(tokens, shape.tokens), shape.splits)
    sums = counters = None
    if shape.splits > 1:
        sums = torch.empty(grid[0] * grid[1], shape.splits, shape.rows, shape.tokens, dtype=torch.float32, device=device)
        counters = _counters_on(device)
    _wide_kernel[grid](
        half_TGK,
        factor_TG,
        w_NK.view(torch.uint8),
        scale_nk,
        out_TN,
        sums,
        counters,
        tokens,
        N=n,
        K=k,
        NUM_GROUPS=groups,
        BLOCK_T=shape.tokens,
        BLOCK_N=shape.rows,
        BLOCK_K=shape.columns,
        TILE_COLUMNS=triton.next_power_of_2(k // 32),
        SPLITS=shape.splits,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


@triton.jit
def _halve_kernel(x_ptr, half_ptr, factor_ptr, token_stride, group_stride, K: tl.constexpr, COLUMNS: tl.constexpr):
    """One row: its largest magnitude to just below 2**15, columns in their places."""
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    x_ptr += tl.program_id(0).to(tl.int64) * token_stride + tl.program_id(1) * group_stride
    size = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        size = tl.maximum(size, tl.abs(tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)))
    largest = tl.max(size, 0)
    exponent = tl.where(largest > 0, 14 - ((largest.to(tl.int32, bitcast=True) >> 23) - 127), 0)
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    tl.store(factor_ptr + row, power_of_two(-exponent))
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32) * power_of_two(exponent)
        tl.store(half_ptr + row * K + places(column), x.to(tl.float16), mask=column < K)


@triton.jit
def _wide_kernel(
    x_ptr,
    factor_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    sums_ptr,
    counters_ptr,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    TILES: tl.constexpr = BLOCK_N // 32
    STEPS: tl.constexpr = K // (SPLITS * BLOCK_K)
    first_n, first_k = tl.program_id(0) * BLOCK_N, tl.program_id(2) * (K // SPLITS)
    group = first_n // (N // NUM_GROUPS)
    n = first_n + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = (token < tokens)[None, :]
    scale_ptr += (first_n // 32) * (K // 32)
    tile_row = tl.arange(0, TILES)[:, None] * (K // 32)
    every = tl.arange(0, TILE_COLUMNS)[None, :]
    largest = tl.max(tl.load(scale_ptr + tile_row + every, mask=every < K // 32, other=0).to(tl.int32), 1)
    column = first_k + tl.arange(0, BLOCK_K)
    w = w_ptr + n[:, None].to(tl.int64) * K + column[None, :]
    x = x_ptr + (token[None, :].to(tl.int64) * NUM_GROUPS + group) * K + column[:, None]
    scale = scale_ptr + tile_row + first_k // 32 + tl.arange(0, BLOCK_K // 32)[None, :]
    out = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    scale_raw = tl.load(scale)
    for step in range(STEPS):
        scale += tl.where(step + 1 < STEPS, BLOCK_K // 32, 0)
        next_scale_raw = tl.load(scale)
        raw = tl.load(w)
        x_tile = tl.load(x, mask=is_token, other=0.0)
        factor = e4m3_scaled_factor(scale_raw.to(tl.int32) - largest[:, None])
        spread = tl.reshape(tl.broadcast_to(factor[:, None, :, None], (TILES, 32, BLOCK_K // 32, 32)), (BLOCK_N, BLOCK_K))
        out = dot(unpack_e4m3_scaled(in_places(raw, BLOCK_N, BLOCK_K // 16), spread), x_tile, out)
        scale_raw = next_scale_raw
        w += BLOCK_K
        x += BLOCK_K
    to = out_ptr + token[None, :].to(tl.int64) * N + n[:, None]
    row_factor = (largest << 23).to(tl.float32, bitcast=True) * E4M3_SCALED_RESTORE
    row_factor = tl.reshape(tl.broadcast_to(row_factor[:, None], (TILES, 32)), (BLOCK_N,))[:, None]
    token_factor = tl.load(factor_ptr + token * NUM_GROUPS + group, mask=token < tokens, other=0.0)[None, :]
    if SPLITS == 1:
        tl.store(to, narrow(out * row_factor * token_factor, out_ptr.dtype.element_ty), mask=is_token)
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        sums_ptr += tile * (SPLITS * BLOCK_N * BLOCK_T)
        tl.store(sums_ptr + tl.program_id(2) * (BLOCK_N * BLOCK_T) + place, out)
        tl.debug_barrier()  # all of this program's sums stand before it is counted
        num_done = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if num_done == SPLITS - 1:
            total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for split in range(SPLITS):
                total += tl.load(sums_ptr + split * (BLOCK_N * BLOCK_T) + place, cache_modifier=".cg")
            tl.store(to, narrow(total * row_factor * token_factor, out_ptr.dtype.element_ty), mask=is_token)
            tl.store(counters_ptr + tile, 0)
