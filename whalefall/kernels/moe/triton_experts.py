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

from whalefall.kernels.moe.reference import experts_mxfp4, experts_mxfp4_onto
from whalefall.kernels.moe.triton_few import down_few, up_few
from whalefall.kernels.moe.triton_many import down_many, up_many
from whalefall.kernels.moe.triton_order import Order, order_by_expert
from whalefall.kernels.registry import Device
from whalefall.kernels.triton_math import narrow


@dataclass(frozen=True, slots=True)
class Shape:
    """How one product is cut: tokens, weight rows and columns a step, warps, stages."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int


SHAPES = (
    (5, True, Shape(8, 32, 256, 4, 3), Shape(8, 64, 256, 4, 4)),
    (12, True, Shape(16, 32, 256, 4, 3), Shape(16, 32, 256, 4, 3)),
    (40, False, Shape(64, 64, 128, 4, 3), Shape(64, 128, 64, 4, 4)),
    (math.inf, False, Shape(128, 64, 64, 4, 4), Shape(128, 128, 64, 4, 3)),
)
"""Up to this mean number of rows an expert, were they spread evenly: whether that is few, gate/up, down."""


def shapes_for(num_pairs: int, num_experts: int) -> tuple[bool, tuple[Shape, Shape]]:
    return next((few, (up, down)) for most, few, up, down in SHAPES if num_pairs <= most * num_experts)


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
    out_TH = torch.empty(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    return _experts(None, out_TH, x_TH, expert_TA, weight_TA, (w13_EFh, scale13_EFg), (w2_EHf, scale2_EHg), limit)


def _fits_onto(
    base_TH: Tensor,
    x_TH: Tensor,
    expert_TA: Tensor,
    weight_TA: Tensor,
    w13_EFh: Tensor,
    scale13_EFg: Tensor,
    w2_EHf: Tensor,
    scale2_EHg: Tensor,
    limit: float,
) -> bool:
    return base_TH.is_contiguous() and _fits(x_TH, expert_TA, weight_TA, w13_EFh, scale13_EFg, w2_EHf, scale2_EHg, limit)


@experts_mxfp4_onto.impl("triton", needs=Device(sm=90), when=_fits_onto)
def experts_mxfp4_onto_triton(
    base_TH: Tensor,
    x_TH: Tensor,
    expert_TA: Tensor,
    weight_TA: Tensor,
    w13_EFh: Tensor,
    scale13_EFg: Tensor,
    w2_EHf: Tensor,
    scale2_EHg: Tensor,
    limit: float,
) -> Tensor:
    out_TH = torch.empty(base_TH.shape, dtype=base_TH.dtype, device=base_TH.device)
    return _experts(base_TH, out_TH, x_TH, expert_TA, weight_TA, (w13_EFh, scale13_EFg), (w2_EHf, scale2_EHg), limit)


def _experts(
    base_TH: Tensor | None,
    out_TH: Tensor,
    x_TH: Tensor,
    expert_TA: Tensor,
    weight_TA: Tensor,
    packed13: tuple[Tensor, Tensor],
    packed2: tuple[Tensor, Tensor],
    limit: float,
) -> Tensor:
    (tokens, hidden), (num_pairs, num_experts) = x_TH.shape, (expert_TA.numel(), packed13[0].shape[0])
    if not tokens:
        return out_TH
    w13, w2 = (packed13[0].view(torch.uint8), packed13[1]), (packed2[0].view(torch.uint8), packed2[1])
    is_few, (up, down) = shapes_for(num_pairs, num_experts)
    order = order_by_expert(x_TH, expert_TA, num_experts, up.tokens, in_places=not is_few)
    # Of few rows an expert the sums are kept whole; of many they are half the bytes.
    y_RH = torch.empty(num_pairs, hidden, dtype=torch.float32 if is_few else x_TH.dtype, device=x_TH.device)
    _run(order, is_few, up, down, w13, w2, limit, expert_TA.shape[1], y_RH)
    columns, per_token = min(1024, triton.next_power_of_2(hidden)), expert_TA.shape[1]
    grid = (tokens, triton.cdiv(hidden, columns))
    pairs = (expert_TA.contiguous(), weight_TA.contiguous())
    _combine_kernel[grid](
        y_RH, *pairs, base_TH, out_TH, HIDDEN=hidden, PER_TOKEN=per_token, BLOCK=columns, HAS_BASE=base_TH is not None, num_warps=4
    )
    return out_TH


def _run(
    order: Order,
    is_few: bool,
    up: Shape,
    down: Shape,
    w13: tuple[Tensor, Tensor],
    w2: tuple[Tensor, Tensor],
    limit: float,
    per_token: int,
    y_RH: Tensor,
) -> None:
    """Both products of every tile, into a row per pair."""
    num_tiles, (num_pairs, hidden), inner = order.tiles_X3.shape[0], y_RH.shape, 2 * w2[0].shape[2]
    # The SwiGLU's output is at most limit**2; times this it fills float16.
    inner_factor = 2.0 ** math.floor(math.log2(60000 / limit**2))
    inner_RF = torch.empty(num_pairs, inner, dtype=torch.float16, device=y_RH.device)
    sizes = {"INNER": inner, "HIDDEN": hidden}
    where = (order.tiles_X3, order.pair_R)
    up_kernel, down_kernel = (up_few, down_few) if is_few else (up_many, down_many)
    up_kernel[(inner // up.rows, num_tiles)](
        order.x_T2h, order.factor_T, *w13, inner_RF, *where, limit, inner_factor, PER_TOKEN=per_token, **sizes, **_cut(up, hidden, is_few)
    )
    down_kernel[(hidden // down.rows, num_tiles)](inner_RF, *w2, y_RH, *where, inner_factor, **sizes, **_cut(down, inner, is_few))


def _cut(shape: Shape, columns: int, is_few: bool) -> dict[str, int]:
    made = {"BLOCK_T": shape.tokens, "BLOCK_N": shape.rows, "GROUPS": shape.columns // 32}
    if not is_few:
        made["ALL_GROUPS"] = triton.next_power_of_2(columns // 32)
    return made | {"num_warps": shape.warps, "num_stages": shape.stages}


@triton.jit
def _combine_kernel(
    y_ptr,
    expert_ptr,
    weight_ptr,
    base_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BASE: tl.constexpr,
):
    """out[token] = sum of its pairs' y times their weights, in the pairs' order, and the base."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + place
        has_expert = tl.load(expert_ptr + pair) >= 0
        y = tl.load(y_ptr + pair * HIDDEN + column, mask=(column < HIDDEN) & has_expert, other=0.0).to(tl.float32)
        total += y * tl.load(weight_ptr + pair)
    if HAS_BASE:
        total += tl.load(base_ptr + token * HIDDEN + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + column, narrow(total, out_ptr.dtype.element_ty), mask=column < HIDDEN)
