# SPDX-License-Identifier: Apache-2.0
"""The experts' products for many rows an expert: tiles of 32 to 128 tokens for the warp-group matrix units, float16 sums in float32.

The scales are applied as the weights are unpacked, relative to the largest scale of the weight's row, so that they fit float16 and the
sums run on through all columns; that largest scale comes back at the end. A group whose scale is more than 2**29 below its row's largest
counts as zero: float32 sums would lose it too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from whalefall.kernels.quant.unpack import SCALED_RESTORE, e2m1_factor, in_places, places, unpack_e2m1_scaled
from whalefall.kernels.triton_math import dot, narrow


@triton.jit
def _largest_scale(scale_ptr, n, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """int32 largest UE8M0 byte of each row [N]."""
    group = tl.arange(0, BLOCK)
    raw = tl.load(scale_ptr + n[:, None] * (COLUMNS // 32) + group[None, :], mask=(group < COLUMNS // 32)[None, :], other=0)
    return tl.max(raw.to(tl.int32), 1)


@triton.jit
def _unpack(raw, scale_raw, largest, N: tl.constexpr, G: tl.constexpr):
    factor = e2m1_factor(scale_raw.to(tl.int32) - largest[:, None])
    return unpack_e2m1_scaled(in_places(raw, N, G), tl.reshape(tl.broadcast_to(factor[:, :, None], (N, G, 16)), (N, G * 16)))


@triton.jit
def _restore(total, largest):
    """Undoes what `_unpack` left out: 2**(largest - 127) and the format's own factor."""
    return total * ((largest << 23).to(tl.float32, bitcast=True) * SCALED_RESTORE)[:, None]


@triton.jit
def up_many(
    x_ptr,
    factor_ptr,
    w_ptr,
    scale_ptr,
    inner_ptr,
    tiles_ptr,
    pair_ptr,
    limit,
    inner_factor,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
):
    """inner[row] = swiglu(w1 @ x, w3 @ x) * inner_factor as float16, even columns first; row counts in order of experts."""
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile * 3)
    if expert < 0:
        return
    begin, end = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    w_ptr += expert.to(tl.int64) * (INNER * HIDDEN)
    scale_ptr += expert.to(tl.int64) * (2 * INNER * (HIDDEN // 32))
    # The last tile of an expert is often less than half full; then half a tile does.
    if end - begin <= BLOCK_T // 2:
        _up_tile(x_ptr, factor_ptr, w_ptr, scale_ptr, inner_ptr, pair_ptr, begin, end, limit, inner_factor, INNER, HIDDEN, PER_TOKEN,
                 BLOCK_T // 2, BLOCK_N, GROUPS, ALL_GROUPS)  # fmt: skip
    else:
        _up_tile(x_ptr, factor_ptr, w_ptr, scale_ptr, inner_ptr, pair_ptr, begin, end, limit, inner_factor, INNER, HIDDEN, PER_TOKEN,
                 BLOCK_T, BLOCK_N, GROUPS, ALL_GROUPS)  # fmt: skip


@triton.jit
def _up_tile(
    x_ptr,
    factor_ptr,
    w_ptr,
    scale_ptr,
    inner_ptr,
    pair_ptr,
    begin,
    end,
    limit,
    inner_factor,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
):
    row = begin + tl.arange(0, BLOCK_T)
    is_row = row < end
    token = tl.load(pair_ptr + row, mask=is_row, other=0) // PER_TOKEN
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.arange(0, 16 * GROUPS)
    w = w_ptr + n[:, None] * (HIDDEN // 2) + byte[None, :]
    gate_largest = _largest_scale(scale_ptr, n, HIDDEN, ALL_GROUPS)
    up_largest = _largest_scale(scale_ptr, n + INNER, HIDDEN, ALL_GROUPS)
    scale = scale_ptr + n[:, None] * (HIDDEN // 32) + tl.arange(0, GROUPS)[None, :]
    x = x_ptr + token[None, :].to(tl.int64) * HIDDEN + byte[:, None]
    gate = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    gate_scale = tl.load(scale)
    up_scale = tl.load(scale + INNER * (HIDDEN // 32))
    STEPS: tl.constexpr = HIDDEN // (32 * GROUPS)
    for step in range(STEPS):
        # Scales are too small for the copy engine; they come one step ahead by hand.
        scale += tl.where(step + 1 < STEPS, GROUPS, 0)
        next_gate_scale = tl.load(scale)
        next_up_scale = tl.load(scale + INNER * (HIDDEN // 32))
        gate_raw = tl.load(w)
        up_raw = tl.load(w + INNER * (HIDDEN // 2))
        x_even = tl.load(x, mask=is_row[None, :], other=0.0)
        x_odd = tl.load(x + HIDDEN // 2, mask=is_row[None, :], other=0.0)
        even, odd = _unpack(gate_raw, gate_scale, gate_largest, BLOCK_N, GROUPS)
        gate = dot(even, x_even, gate)
        gate = dot(odd, x_odd, gate)
        even, odd = _unpack(up_raw, up_scale, up_largest, BLOCK_N, GROUPS)
        up = dot(even, x_even, up)
        up = dot(odd, x_odd, up)
        gate_scale, up_scale = next_gate_scale, next_up_scale
        w += 16 * GROUPS
        x += 16 * GROUPS
    factor = tl.load(factor_ptr + token, mask=is_row, other=0.0)[None, :]
    gate = tl.minimum(_restore(gate, gate_largest) * factor, limit)
    up = tl.minimum(tl.maximum(_restore(up, up_largest) * factor, -limit), limit)
    inner = gate / (1.0 + tl.exp(-gate)) * up * inner_factor
    to = inner_ptr + row[None, :].to(tl.int64) * INNER + ((n % 2) * (INNER // 2) + places(n // 2))[:, None]
    tl.store(to, inner.to(tl.float16), mask=is_row[None, :])


@triton.jit
def down_many(
    inner_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    tiles_ptr,
    pair_ptr,
    inner_factor,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
):
    """y[pair] = w2 @ inner[row] / inner_factor."""
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile * 3)
    if expert < 0:
        return
    begin, end = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    w_ptr += expert.to(tl.int64) * (HIDDEN * (INNER // 2))
    scale_ptr += expert.to(tl.int64) * (HIDDEN * (INNER // 32))
    if end - begin <= BLOCK_T // 2:
        _down_tile(inner_ptr, w_ptr, scale_ptr, y_ptr, pair_ptr, begin, end, inner_factor, INNER, HIDDEN,
                   BLOCK_T // 2, BLOCK_N, GROUPS, ALL_GROUPS)  # fmt: skip
    else:
        _down_tile(inner_ptr, w_ptr, scale_ptr, y_ptr, pair_ptr, begin, end, inner_factor, INNER, HIDDEN,
                   BLOCK_T, BLOCK_N, GROUPS, ALL_GROUPS)  # fmt: skip


@triton.jit
def _down_tile(
    inner_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    pair_ptr,
    begin,
    end,
    inner_factor,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
):
    row = begin + tl.arange(0, BLOCK_T)
    is_row = row < end
    pair = tl.load(pair_ptr + row, mask=is_row, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.arange(0, 16 * GROUPS)
    w = w_ptr + n[:, None] * (INNER // 2) + byte[None, :]
    largest = _largest_scale(scale_ptr, n, INNER, ALL_GROUPS)
    scale = scale_ptr + n[:, None] * (INNER // 32) + tl.arange(0, GROUPS)[None, :]
    inner = inner_ptr + row[None, :].to(tl.int64) * INNER + byte[:, None]
    y = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    scale_raw = tl.load(scale)
    STEPS: tl.constexpr = INNER // (32 * GROUPS)
    for step in range(STEPS):
        scale += tl.where(step + 1 < STEPS, GROUPS, 0)
        next_scale_raw = tl.load(scale)
        raw = tl.load(w)
        inner_even = tl.load(inner, mask=is_row[None, :], other=0.0)
        inner_odd = tl.load(inner + INNER // 2, mask=is_row[None, :], other=0.0)
        even, odd = _unpack(raw, scale_raw, largest, BLOCK_N, GROUPS)
        y = dot(even, inner_even, y)
        y = dot(odd, inner_odd, y)
        scale_raw = next_scale_raw
        w += 16 * GROUPS
        inner += 16 * GROUPS
    to = y_ptr + pair[None, :].to(tl.int64) * HIDDEN + n[:, None]
    tl.store(to, narrow(_restore(y, largest) / inner_factor, y_ptr.dtype.element_ty), mask=is_row[None, :])
