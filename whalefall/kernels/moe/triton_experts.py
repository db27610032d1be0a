# SPDX-License-Identifier: Apache-2.0
"""Packed FP4 experts on a GPU: order, gate/up with SwiGLU, down, weighted sum; four launches, nothing known to the host but shapes.

Products stand on their side, out.T = w @ x.T: the weights' rows fill the matrix units' long edge and few tokens waste little. Weights go
from memory to registers as stored and become 16-bit floats there, in one form for few rows an expert and one for many.
Intermediate values are rounded less often than in the reference. Benchmark: benchmarks/kernels/gpu_k1.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.moe.reference import experts_mxfp4
from whalefall.kernels.moe.triton_few import down_few, up_few
from whalefall.kernels.moe.triton_many import down_many, up_many
from whalefall.kernels.moe.triton_order import Order, order_by_expert
from whalefall.kernels.registry import Device


@dataclass(frozen=True, slots=True)
class Shape:
    """How one product is cut: tokens, weight rows and columns a step, warps, stages."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int


FEW = {8: (Shape(8, 32, 256, 4, 3), Shape(8, 64, 256, 4, 4)), 16: (Shape(16, 32, 256, 4, 3), Shape(16, 32, 256, 4, 3))}
"""(gate/up, down) by tokens a tile, for few rows an expert."""


def few_tile(num_pairs: int, num_experts: int) -> int | None:
    """Tokens a tile for few rows an expert, by the mean that an even gate would give each; None for many."""
    mean = num_pairs / num_experts
    return 8 if mean <= 5 else 16 if mean <= 12 else None


def many_shapes(num_pairs: int, num_experts: int) -> tuple[Shape, Shape]:
    """(gate/up, down) for many rows an expert."""
    mean = num_pairs / num_experts
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
    (tokens, hidden), num_pairs, num_experts = x_TH.shape, expert_TA.numel(), w13_EFh.shape[0]
    out_TH = torch.empty(tokens, hidden, dtype=torch.float32, device=x_TH.device)
    if not tokens:
        return out_TH
    w13, w2 = (w13_EFh.view(torch.uint8), scale13_EFg), (w2_EHf.view(torch.uint8), scale2_EHg)
    few = few_tile(num_pairs, num_experts)
    if few is not None:
        order = order_by_expert(x_TH, expert_TA, num_experts, few, in_halves=True)
        y_RH = _run_few(order, FEW[few], w13, w2, limit, expert_TA.shape[1])
    else:
        shapes = many_shapes(num_pairs, num_experts)
        order = order_by_expert(x_TH, expert_TA, num_experts, shapes[0].tokens, in_halves=False)
        y_RH = _run_many(order, shapes, w13, w2, limit, expert_TA.shape[1])
    columns = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(tokens, triton.cdiv(hidden, columns))](
        y_RH,
        expert_TA.contiguous(),
        weight_TA.contiguous(),
        out_TH,
        HIDDEN=hidden,
        PER_TOKEN=expert_TA.shape[1],
        BLOCK=columns,
        num_warps=4,
    )
    return out_TH


def _run_few(
    order: Order, shapes: tuple[Shape, Shape], w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor], limit: float, per_token: int
) -> Tensor:
    """float32 [R, H], a row per pair."""
    up, down = shapes
    num_pairs, num_tiles = order.pair_R.shape[0], order.tiles_X3.shape[0]
    hidden, inner = w2[0].shape[1], 2 * w2[0].shape[2]
    # The SwiGLU's output is at most limit**2; times this it fills float16.
    inner_factor = 2.0 ** math.floor(math.log2(60000 / limit**2))
    inner_RF = torch.empty(num_pairs, inner, dtype=torch.float16, device=order.pair_R.device)
    y_RH = torch.empty(num_pairs, hidden, dtype=torch.float32, device=order.pair_R.device)
    sizes = {"INNER": inner, "HIDDEN": hidden}
    up_few[(inner // up.rows, num_tiles)](
        order.x_T2h,
        order.factor_T,
        *w13,
        inner_RF,
        order.tiles_X3,
        order.pair_R,
        limit,
        inner_factor,
        **sizes,
        PER_TOKEN=per_token,
        BLOCK_T=up.tokens,
        BLOCK_N=up.rows,
        GROUPS=up.columns // 32,
        num_warps=up.warps,
        num_stages=up.stages,
    )
    down_few[(hidden // down.rows, num_tiles)](
        inner_RF,
        *w2,
        y_RH,
        order.tiles_X3,
        order.pair_R,
        inner_factor,
        **sizes,
        BLOCK_T=down.tokens,
        BLOCK_N=down.rows,
        GROUPS=down.columns // 32,
        num_warps=down.warps,
        num_stages=down.stages,
    )
    return y_RH


def _run_many(
    order: Order, shapes: tuple[Shape, Shape], w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor], limit: float, per_token: int
) -> Tensor:
    """bfloat16 [R, H], a row per pair."""
    up, down = shapes
    num_pairs, num_tiles = order.pair_R.shape[0], order.tiles_X3.shape[0]
    hidden, inner = w2[0].shape[1], 2 * w2[0].shape[2]
    inner_RF = torch.empty(num_pairs, inner, dtype=order.x_T2h.dtype, device=order.pair_R.device)
    y_RH = torch.empty(num_pairs, hidden, dtype=order.x_T2h.dtype, device=order.pair_R.device)
    sizes = {"INNER": inner, "HIDDEN": hidden}
    up_many[(inner // up.rows, num_tiles)](
        order.x_T2h,
        *w13,
        inner_RF,
        order.tiles_X3,
        order.pair_R,
        limit,
        **sizes,
        PER_TOKEN=per_token,
        BLOCK_T=up.tokens,
        BLOCK_N=up.rows,
        BLOCK_K=up.columns,
        num_warps=up.warps,
        num_stages=up.stages,
    )
    down_many[(hidden // down.rows, num_tiles)](
        inner_RF,
        *w2,
        y_RH,
        order.tiles_X3,
        order.pair_R,
        **sizes,
        BLOCK_T=down.tokens,
        BLOCK_N=down.rows,
        BLOCK_K=down.columns,
        num_warps=down.warps,
        num_stages=down.stages,
    )
    return y_RH


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
