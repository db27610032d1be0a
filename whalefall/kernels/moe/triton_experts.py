# SPDX-License-Identifier: Apache-2.0
"""Packed FP4 experts on a GPU: order, gate/up with SwiGLU, down, weighted sum; four launches, nothing known to the host but shapes.

Products stand on their side, out.T = w @ x.T: the weights' rows fill the matrix units' long edge and few tokens waste little. Weights go
from memory to registers as stored and become bfloat16 there (`quant.unpack`). Few rows an expert: the weights' bytes are all that counts,
so tiles are small, loads deep. Many rows: tiles of 64 or 128 tokens for the warp-group matrix units.
Intermediate values are rounded less often than in the reference. Benchmark: benchmarks/kernels/gpu_k1.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.moe.reference import experts_mxfp4
from whalefall.kernels.moe.triton_order import order_by_expert
from whalefall.kernels.quant.unpack import RESTORE, e2m1_factor, unpack_e2m1
from whalefall.kernels.registry import Device
from whalefall.kernels.triton_math import dot, narrow


@dataclass(frozen=True, slots=True)
class Shape:
    """How one product is cut: tokens, weight rows and columns a step, warps, stages."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int


def shapes_for(num_pairs: int, num_experts: int) -> tuple[Shape, Shape]:
    """(gate/up, down) for the mean number of rows an expert gets if the gate spreads them evenly."""
    mean = num_pairs / num_experts
    if mean <= 5:
        return Shape(8, 32, 256, 2, 3), Shape(8, 32, 256, 2, 4)
    if mean <= 12:
        return Shape(16, 32, 256, 2, 3), Shape(16, 32, 256, 2, 4)
    if mean <= 28:
        return Shape(32, 32, 256, 2, 3), Shape(32, 64, 256, 4, 3)
    if mean <= 56:
        return Shape(64, 64, 128, 4, 3), Shape(64, 128, 128, 8, 3)
    return Shape(128, 64, 128, 4, 3), Shape(128, 128, 128, 8, 3)


def _fits(
    x_TH: Tensor,
    expert_TA: Tensor,
    weight_TA: Tensor,
    w13_EFh: Tensor,
    scale13_EFg: Tensor,
    w2_EHf: Tensor,
    scale2_EHg: Tensor,
    limit: float,
) -> bool:
    hidden, inner = x_TH.shape[1], w13_EFh.shape[1] // 2
    is_whole = hidden % 256 == 0 and inner % 256 == 0
    is_plain = all(t.is_contiguous() for t in (w13_EFh, scale13_EFg, w2_EHf, scale2_EHg)) and x_TH.stride(1) == 1
    return x_TH.dtype == torch.bfloat16 and is_whole and is_plain


@experts_mxfp4.impl("triton", needs=Device(sm=90), when=_fits)
def experts_mxfp4_triton(
    x_TH: Tensor,
    expert_TA: Tensor,
    weight_TA: Tensor,
    w13_EFh: Tensor,
    scale13_EFg: Tensor,
    w2_EHf: Tensor,
    scale2_EHg: Tensor,
    limit: float,
) -> Tensor:
    """An expert id below 0 stands for none: rows that only pad a batch read no weights."""
    (tokens, hidden), num_pairs = x_TH.shape, expert_TA.numel()
    num_experts, inner = w13_EFh.shape[0], w13_EFh.shape[1] // 2
    out_TH = torch.empty(tokens, hidden, dtype=torch.float32, device=x_TH.device)
    if not tokens:
        return out_TH
    up, down = shapes_for(num_pairs, num_experts)
    order = order_by_expert(x_TH, expert_TA, num_experts, up.tokens)
    inner_RF = torch.empty(num_pairs, inner, dtype=x_TH.dtype, device=x_TH.device)
    y_RH = torch.empty(num_pairs, hidden, dtype=x_TH.dtype, device=x_TH.device)
    num_tiles, per_token = order.tiles_X3.shape[0], expert_TA.shape[1]
    _up_kernel[(inner // up.rows, num_tiles)](
        order.x_T2h,
        w13_EFh.view(torch.uint8),
        scale13_EFg,
        inner_RF,
        order.tiles_X3,
        order.pair_R,
        limit,
        INNER=inner,
        HIDDEN=hidden,
        PER_TOKEN=per_token,
        BLOCK_T=up.tokens,
        BLOCK_N=up.rows,
        BLOCK_K=up.columns,
        num_warps=up.warps,
        num_stages=up.stages,
    )
    _down_kernel[(hidden // down.rows, num_tiles)](
        inner_RF,
        w2_EHf.view(torch.uint8),
        scale2_EHg,
        y_RH,
        order.tiles_X3,
        order.pair_R,
        INNER=inner,
        HIDDEN=hidden,
        BLOCK_T=down.tokens,
        BLOCK_N=down.rows,
        BLOCK_K=down.columns,
        num_warps=down.warps,
        num_stages=down.stages,
    )
    columns = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(tokens, triton.cdiv(hidden, columns))](
        y_RH, expert_TA.contiguous(), weight_TA.contiguous(), out_TH, HIDDEN=hidden, PER_TOKEN=per_token, BLOCK=columns, num_warps=4
    )
    return out_TH


@triton.jit
def _spread(factor, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """One factor per 32 values to one per byte of two values."""
    return tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, GROUPS, 16)), (ROWS, GROUPS * 16))


@triton.jit
def _up_kernel(
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
def _down_kernel(
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


@triton.jit
def _combine_kernel(y_ptr, expert_ptr, weight_ptr, out_ptr, HIDDEN: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """out[token] = sum of its pairs' y times their weights, in the pairs' order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + place
        has_expert = tl.load(expert_ptr + pair) >= 0
        y = tl.load(y_ptr + pair * HIDDEN + column, mask=(column < HIDDEN) & has_expert, other=0.0).to(tl.float32)
        total += y * tl.load(weight_ptr + pair)
    tl.store(out_ptr + token * HIDDEN + column, total, mask=column < HIDDEN)
