# SPDX-License-Identifier: Apache-2.0
"""The experts' products for few rows an expert: the weights' bytes are all that counts, and instructions a weight come next.

A step takes some groups of 32 columns, each warp its own: weights become float16 at little cost, every group's product starts from zero and
is scaled as it is added, so that no weight is multiplied by its scale. The groups' sums meet at the end.
At full memory speed a Hopper multiprocessor has about 4 instructions for each FP4 weight; this form needs 2.6.
"""

from __future__ import annotations

import triton
import triton.language as tl

from whalefall.kernels.quant.unpack import HALF_RESTORE, unpack_e2m1_half
from whalefall.kernels.triton_math import dot


@triton.jit
def _scale(raw):
    """float32 2**(byte - 127) of [N, G] UE8M0 bytes, as [G, N, 1]."""
    return tl.trans((raw.to(tl.int32) << 23).to(tl.float32, bitcast=True))[:, :, None]


@triton.jit
def _add_groups(total, raw, scale_raw, x_even, x_odd, N: tl.constexpr, G: tl.constexpr):
    """total[g] + scale[g] * (the product of group g), for [N, 16 G] packed bytes."""
    even, odd = unpack_e2m1_half(tl.trans(tl.reshape(raw, (N, G, 16)), 1, 0, 2))
    product = dot(odd, x_odd, dot(even, x_even, tl.zeros_like(total)))
    return total + product * _scale(scale_raw)


@triton.jit
def up_few(
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
):
    """inner[row] = swiglu(w1 @ x, w3 @ x) * inner_factor as float16, even columns first; row counts in order of experts."""
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile * 3)
    if expert < 0:
        return
    end = tl.load(tiles_ptr + tile * 3 + 2)
    row = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_T)
    is_row = row < end
    token = tl.load(pair_ptr + row, mask=is_row, other=0) // PER_TOKEN
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.arange(0, GROUPS)
    w = w_ptr + expert.to(tl.int64) * (INNER * HIDDEN) + n[:, None] * (HIDDEN // 2) + tl.arange(0, 16 * GROUPS)[None, :]
    scale = scale_ptr + expert.to(tl.int64) * (2 * INNER * (HIDDEN // 32)) + n[:, None] * (HIDDEN // 32) + group[None, :]
    x = x_ptr + token[None, None, :].to(tl.int64) * HIDDEN + (group[:, None, None] * 16 + tl.arange(0, 16)[None, :, None])
    mask = is_row[None, None, :]
    gate = tl.zeros((GROUPS, BLOCK_N, BLOCK_T), tl.float32)
    up = tl.zeros((GROUPS, BLOCK_N, BLOCK_T), tl.float32)
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
        x_even = tl.load(x, mask=mask, other=0.0)
        x_odd = tl.load(x + HIDDEN // 2, mask=mask, other=0.0)
        gate = _add_groups(gate, gate_raw, gate_scale, x_even, x_odd, BLOCK_N, GROUPS)
        up = _add_groups(up, up_raw, up_scale, x_even, x_odd, BLOCK_N, GROUPS)
        gate_scale, up_scale = next_gate_scale, next_up_scale
        w += 16 * GROUPS
        x += 16 * GROUPS
    factor = tl.load(factor_ptr + token, mask=is_row, other=0.0)[None, :] * HALF_RESTORE
    gate_sum = tl.minimum(tl.sum(gate, 0) * factor, limit)
    up_sum = tl.minimum(tl.maximum(tl.sum(up, 0) * factor, -limit), limit)
    inner = gate_sum / (1.0 + tl.exp(-gate_sum)) * up_sum * inner_factor
    to = inner_ptr + row[None, :].to(tl.int64) * INNER + ((n % 2) * (INNER // 2) + n // 2)[:, None]
    tl.store(to, inner.to(tl.float16), mask=is_row[None, :])


@triton.jit
def down_few(
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
):
    """y[pair] = w2 @ inner[row] / inner_factor, float32."""
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile * 3)
    if expert < 0:
        return
    end = tl.load(tiles_ptr + tile * 3 + 2)
    row = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_T)
    is_row = row < end
    pair = tl.load(pair_ptr + row, mask=is_row, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.arange(0, GROUPS)
    w = w_ptr + expert.to(tl.int64) * (HIDDEN * (INNER // 2)) + n[:, None] * (INNER // 2) + tl.arange(0, 16 * GROUPS)[None, :]
    scale = scale_ptr + expert.to(tl.int64) * (HIDDEN * (INNER // 32)) + n[:, None] * (INNER // 32) + group[None, :]
    inner = inner_ptr + row[None, None, :].to(tl.int64) * INNER + (group[:, None, None] * 16 + tl.arange(0, 16)[None, :, None])
    mask = is_row[None, None, :]
    y = tl.zeros((GROUPS, BLOCK_N, BLOCK_T), tl.float32)
    scale_raw = tl.load(scale)
    STEPS: tl.constexpr = INNER // (32 * GROUPS)
    for step in range(STEPS):
        scale += tl.where(step + 1 < STEPS, GROUPS, 0)
        next_scale_raw = tl.load(scale)
        raw = tl.load(w)
        inner_even = tl.load(inner, mask=mask, other=0.0)
        inner_odd = tl.load(inner + INNER // 2, mask=mask, other=0.0)
        y = _add_groups(y, raw, scale_raw, inner_even, inner_odd, BLOCK_N, GROUPS)
        scale_raw = next_scale_raw
        w += 16 * GROUPS
        inner += 16 * GROUPS
    to = y_ptr + pair[None, :].to(tl.int64) * HIDDEN + n[:, None]
    tl.store(to, tl.sum(y, 0) * (HALF_RESTORE / inner_factor), mask=is_row[None, :])
