# SPDX-License-Identifier: Apache-2.0
"""The shared expert's gate and up products and its SwiGLU in one launch, for few tokens; more take the products one by one.

As `gemm.triton_fp8` for few rows: weights stream, each warp takes a part of the columns, the parts meet at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.moe.reference import swiglu_fp8_tile
from whalefall.kernels.quant.unpack import RESTORE, e4m3_factor, unpack_e4m3
from whalefall.kernels.registry import Device
from whalefall.kernels.triton_math import dot, narrow

MAX_TOKENS = 32
_PARTS, _COLUMNS = 4, 64


def _fits(x_TH: Tensor, w1_FH: Tensor, scale1_fh: Tensor, w3_FH: Tensor, scale3_fh: Tensor, limit: float) -> bool:
    is_plain = all(t.is_contiguous() for t in (w1_FH, scale1_fh, w3_FH, scale3_fh)) and x_TH.dim() == 2 and x_TH.stride(1) == 1
    is_whole = w1_FH.shape[0] % 32 == 0 and w1_FH.shape[1] % (_PARTS * _COLUMNS) == 0
    return x_TH.dtype == torch.bfloat16 and x_TH.shape[0] <= MAX_TOKENS and is_plain and is_whole


@swiglu_fp8_tile.impl("triton", needs=Device(sm=90), when=_fits)
def swiglu_fp8_tile_triton(x_TH: Tensor, w1_FH: Tensor, scale1_fh: Tensor, w3_FH: Tensor, scale3_fh: Tensor, limit: float) -> Tensor:
    tokens, (inner, hidden) = x_TH.shape[0], w1_FH.shape
    out_TF = torch.empty(tokens, inner, dtype=x_TH.dtype, device=x_TH.device)
    if tokens:
        _swiglu_kernel[(inner // 16,)](
            x_TH,
            w1_FH.view(torch.uint8),
            scale1_fh,
            w3_FH.view(torch.uint8),
            scale3_fh,
            out_TF,
            tokens,
            x_TH.stride(0),
            limit,
            INNER=inner,
            HIDDEN=hidden,
            BLOCK_T=next(size for size in (8, 16, 32) if tokens <= size),
            BLOCK_N=16,
            BLOCK_K=2 * _COLUMNS if hidden % (2 * _PARTS * _COLUMNS) == 0 else _COLUMNS,
            PARTS=_PARTS,
            num_warps=_PARTS,
            num_stages=4 if tokens <= 16 else 3,
        )
    return out_TF


@triton.jit
def _unpack(raw, scale, PARTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """[PARTS, N, K] weights from their bytes and one scale per 32 columns; the N rows lie in one tile."""
    spread = tl.broadcast_to(e4m3_factor(scale)[:, :, :, None], (PARTS, N, K // 32, 32))
    return unpack_e4m3(raw, tl.reshape(spread, (PARTS, N, K)))


@triton.jit
def _swiglu_kernel(
    x_ptr,
    w1_ptr,
    scale1_ptr,
    w3_ptr,
    scale3_ptr,
    out_ptr,
    tokens,
    x_stride,
    limit,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    SPAN: tl.constexpr = HIDDEN // PARTS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_T)
    is_token = (token < tokens)[None, None, :]
    column = tl.arange(0, BLOCK_K)
    part = tl.arange(0, PARTS)[:, None, None] * SPAN
    place = n[None, :, None] * HIDDEN + column[None, None, :] + part
    tile = (tl.program_id(0) * BLOCK_N // 32) * (HIDDEN // 32) + tl.arange(0, BLOCK_K // 32)[None, None, :] + part // 32
    x = x_ptr + token[None, None, :].to(tl.int64) * x_stride + column[None, :, None] + part
    gate = tl.zeros((PARTS, BLOCK_N, BLOCK_T), tl.float32)
    up = tl.zeros((PARTS, BLOCK_N, BLOCK_T), tl.float32)
    for _ in range(SPAN // BLOCK_K):
        gate_raw = tl.load(w1_ptr + place)
        up_raw = tl.load(w3_ptr + place)
        gate_scale = tl.broadcast_to(tl.load(scale1_ptr + tile), (PARTS, BLOCK_N, BLOCK_K // 32))
        up_scale = tl.broadcast_to(tl.load(scale3_ptr + tile), (PARTS, BLOCK_N, BLOCK_K // 32))
        x_tile = tl.load(x, mask=is_token, other=0.0)
        gate = dot(_unpack(gate_raw, gate_scale, PARTS, BLOCK_N, BLOCK_K), x_tile, gate)
        up = dot(_unpack(up_raw, up_scale, PARTS, BLOCK_N, BLOCK_K), x_tile, up)
        place += BLOCK_K
        tile += BLOCK_K // 32
        x += BLOCK_K
    gate_sum = tl.minimum(tl.sum(gate, 0) * RESTORE, limit)
    up_sum = tl.minimum(tl.maximum(tl.sum(up, 0) * RESTORE, -limit), limit)
    inner = gate_sum / (1.0 + tl.exp(-gate_sum)) * up_sum
    to = out_ptr + token[None, :].to(tl.int64) * INNER + n[:, None]
    tl.store(to, narrow(inner, out_ptr.dtype.element_ty), mask=(token < tokens)[None, :])
