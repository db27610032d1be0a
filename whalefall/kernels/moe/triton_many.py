# SPDX-License-Identifier: Apache-2.0
"""The experts' products for many rows an expert: bfloat16 tiles of 32 to 128 tokens for the warp-group matrix units.

The weights' scales are applied as they are unpacked, so that the sums run on through all columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from whalefall.kernels.quant.unpack import RESTORE, e2m1_factor, unpack_e2m1
from whalefall.kernels.triton_math import dot, narrow


@triton.jit
def _spread(factor, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """One factor per 32 values to one per byte of two values."""
    return tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, GROUPS, 16)), (ROWS, GROUPS * 16))


@triton.jit
def up_many(
    x_ptr,
    w_ptr,
    scale_ptr,
    inner_ptr,
    tiles_ptr,
    pair_ptr,
    limit,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """inner[row] = swiglu(w1 @ x, w3 @ x), even columns first; row counts in order of experts."""
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile * 3)
    if expert < 0:
        return
    end = tl.load(tiles_ptr + tile * 3 + 2)
    row = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_T)
    is_row = (row < end)[None, :]
    token = tl.load(pair_ptr + row, mask=row < end, other=0) // PER_TOKEN
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.arange(0, BLOCK_K // 2)
    group = tl.arange(0, BLOCK_K // 32)
    w = w_ptr + expert.to(tl.int64) * (INNER * HIDDEN) + n[:, None] * (HIDDEN // 2) + byte[None, :]
    scale = scale_ptr + expert.to(tl.int64) * (2 * INNER * (HIDDEN // 32)) + n[:, None] * (HIDDEN // 32) + group[None, :]
    x = x_ptr + token[None, :].to(tl.int64) * HIDDEN + byte[:, None]
    gate = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for _ in range(HIDDEN // BLOCK_K):
        gate_raw = tl.load(w)
        up_raw = tl.load(w + INNER * (HIDDEN // 2))
        gate_scale = tl.load(scale)
        up_scale = tl.load(scale + INNER * (HIDDEN // 32))
        x_even = tl.load(x, mask=is_row, other=0.0)
        x_odd = tl.load(x + HIDDEN // 2, mask=is_row, other=0.0)
        even, odd = unpack_e2m1(gate_raw, _spread(e2m1_factor(gate_scale), BLOCK_N, BLOCK_K // 32))
        gate = dot(even, x_even, gate)
        gate = dot(odd, x_odd, gate)
        even, odd = unpack_e2m1(up_raw, _spread(e2m1_factor(up_scale), BLOCK_N, BLOCK_K // 32))
        up = dot(even, x_even, up)
        up = dot(odd, x_odd, up)
        w += BLOCK_K // 2
        scale += BLOCK_K // 32
        x += BLOCK_K // 2
    gate = tl.minimum(gate * RESTORE, limit)
    up = tl.minimum(tl.maximum(up * RESTORE, -limit), limit)
    inner = gate / (1.0 + tl.exp(-gate)) * up
    to = inner_ptr + row[None, :].to(tl.int64) * INNER + ((n % 2) * (INNER // 2) + n // 2)[:, None]
    tl.store(to, narrow(inner, inner_ptr.dtype.element_ty), mask=is_row)


@triton.jit
def down_many(
    inner_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    tiles_ptr,
    pair_ptr,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y[pair] = w2 @ inner[row]."""
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile * 3)
    if expert < 0:
        return
    end = tl.load(tiles_ptr + tile * 3 + 2)
    row = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_T)
    is_row = (row < end)[None, :]
    pair = tl.load(pair_ptr + row, mask=row < end, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.arange(0, BLOCK_K // 2)
    group = tl.arange(0, BLOCK_K // 32)
    w = w_ptr + expert.to(tl.int64) * (HIDDEN * (INNER // 2)) + n[:, None] * (INNER // 2) + byte[None, :]
    scale = scale_ptr + expert.to(tl.int64) * (HIDDEN * (INNER // 32)) + n[:, None] * (INNER // 32) + group[None, :]
    inner = inner_ptr + row[None, :].to(tl.int64) * INNER + byte[:, None]
    y = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for _ in range(INNER // BLOCK_K):
        raw = tl.load(w)
        factor = e2m1_factor(tl.load(scale))
        inner_even = tl.load(inner, mask=is_row, other=0.0)
        inner_odd = tl.load(inner + INNER // 2, mask=is_row, other=0.0)
        even, odd = unpack_e2m1(raw, _spread(factor, BLOCK_N, BLOCK_K // 32))
        y = dot(even, inner_even, y)
        y = dot(odd, inner_odd, y)
        w += BLOCK_K // 2
        scale += BLOCK_K // 32
        inner += BLOCK_K // 2
    to = y_ptr + pair[None, :].to(tl.int64) * HIDDEN + n[:, None]
    tl.store(to, narrow(y * RESTORE, y_ptr.dtype.element_ty), mask=is_row)
