# SPDX-License-Identifier: Apache-2.0
"""Products with FP8 tile weights on a GPU, in three forms chosen by the number of rows.

Few rows: the weights' bytes are what a product costs, so they go from memory to registers as stored and become bfloat16 there. The product
stands on its side, out.T = w @ x.T, so that the weights' rows fill the matrix units' long edge. Where the weight has few rows, the warps
of a program share them by columns and add up at the end, so that enough loads are in flight.
Some rows: `triton_fp8_wide`. Many rows: dequantise once, then the library's bfloat16 product; the pass over the weight is a few percent of
it. Benchmark: benchmarks/kernels/gpu_k1.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.gemm.reference import grouped_linear_fp8_tile, linear_fp8_tile
from whalefall.kernels.gemm.triton_fp8_wide import linear_wide
from whalefall.kernels.quant.reference import dequantize_fp8_tile
from whalefall.kernels.quant.unpack import RESTORE, e4m3_factor, unpack_e4m3
from whalefall.kernels.registry import Device
from whalefall.kernels.triton_math import dot, narrow

MAX_FEW_ROWS = 32
MAX_STREAMED_ROWS = 512
"""Above, the product is bound by arithmetic and dequantising first pays."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a product is cut: tokens, weight rows, columns a step; parts of a row that warps share; warps and stages."""

    tokens: int
    rows: int
    columns: int
    parts: int
    warps: int
    stages: int


def shape_for(tokens: int, n: int, k: int) -> Shape:
    """For at most `MAX_FEW_ROWS` tokens and k of whole 128 columns."""
    block_t = next(size for size in (8, 16, 32) if tokens <= size)
    if n > 8192:
        return Shape(block_t, 32, 256 if k % 256 == 0 and block_t < 32 else 128, 1, 2, 4)
    parts = next(p for p in (4, 2, 1) if k % (128 * p) == 0)
    return Shape(block_t, 16, 256 if k % (256 * parts) == 0 and block_t < 32 else 128, parts, parts, 4)


def _fits(x_TK: Tensor, w_NK: Tensor, scale_nk: Tensor) -> bool:
    is_plain = w_NK.is_contiguous() and scale_nk.is_contiguous() and x_TK.dim() == 2 and x_TK.stride(1) == 1
    return x_TK.dtype == torch.bfloat16 and is_plain and w_NK.shape[0] % 64 == 0 and w_NK.shape[1] % 128 == 0


@linear_fp8_tile.impl("triton", needs=Device(sm=90), when=_fits)
def linear_fp8_tile_triton(x_TK: Tensor, w_NK: Tensor, scale_nk: Tensor) -> Tensor:
    if x_TK.shape[0] > MAX_STREAMED_ROWS:
        return torch.nn.functional.linear(x_TK, dequantize_fp8_tile(w_NK, scale_nk, x_TK.dtype))
    out_TN = torch.empty(x_TK.shape[0], w_NK.shape[0], dtype=x_TK.dtype, device=x_TK.device)
    _launch(x_TK, w_NK, scale_nk, out_TN, 1, x_TK.stride(0), 0)
    return out_TN


def _fits_groups(x_TGK: Tensor, w_NK: Tensor, scale_nk: Tensor) -> bool:
    return x_TGK.stride(2) == 1 and _fits(x_TGK[:, 0], w_NK, scale_nk) and w_NK.shape[0] // x_TGK.shape[1] % 64 == 0


@grouped_linear_fp8_tile.impl("triton", needs=Device(sm=90), when=_fits_groups)
def grouped_linear_fp8_tile_triton(x_TGK: Tensor, w_NK: Tensor, scale_nk: Tensor) -> Tensor:
    tokens, groups, _ = x_TGK.shape
    rows = w_NK.shape[0] // groups
    if tokens > MAX_STREAMED_ROWS:
        w_GOK = dequantize_fp8_tile(w_NK, scale_nk, x_TGK.dtype).unflatten(0, (groups, rows))
        return torch.bmm(x_TGK.transpose(0, 1), w_GOK.transpose(1, 2)).transpose(0, 1)
    out_TN = torch.empty(tokens, w_NK.shape[0], dtype=x_TGK.dtype, device=x_TGK.device)
    _launch(x_TGK, w_NK, scale_nk, out_TN, groups, x_TGK.stride(0), x_TGK.stride(1))
    return out_TN.unflatten(1, (groups, rows))


def _launch(x: Tensor, w_NK: Tensor, scale_nk: Tensor, out_TN: Tensor, groups: int, token_stride: int, group_stride: int) -> None:
    (tokens, n), k = out_TN.shape, w_NK.shape[1]
    if not tokens:
        return
    if tokens > MAX_FEW_ROWS:
        linear_wide(x, w_NK, scale_nk, out_TN, groups, token_stride, group_stride)
        return
    shape = shape_for(tokens, n, k)
    _linear_kernel[(n // shape.rows, triton.cdiv(tokens, shape.tokens))](
        x,
        w_NK.view(torch.uint8),
        scale_nk,
        out_TN,
        tokens,
        token_stride,
        group_stride,
        N=n,
        K=k,
        GROUP_ROWS=n // groups,
        BLOCK_T=shape.tokens,
        BLOCK_N=shape.rows,
        BLOCK_K=shape.columns,
        PARTS=shape.parts,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


@triton.jit
def _linear_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    tokens,
    token_stride,
    group_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """out[token, n] = sum over k of w[n, k] x[token, n // GROUP_ROWS, k]; all of a program's n are of one group."""
    TILES: tl.constexpr = (BLOCK_N + 31) // 32
    SPAN: tl.constexpr = K // PARTS
    first_n = tl.program_id(0) * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < tokens
    column = tl.arange(0, BLOCK_K)
    tile_row = first_n // 32 + tl.arange(0, TILES)
    tile_column = tl.arange(0, BLOCK_K // 32)
    x_ptr += (first_n // GROUP_ROWS) * group_stride
    if PARTS == 1:
        w = w_ptr + n[:, None].to(tl.int64) * K + column[None, :]
        scale = scale_ptr + tile_row[:, None] * (K // 32) + tile_column[None, :]
        x = x_ptr + token[None, :].to(tl.int64) * token_stride + column[:, None]
        out = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for _ in range(K // BLOCK_K):
            raw = tl.load(w)
            factor = e4m3_factor(tl.load(scale))
            x_tile = tl.load(x, mask=is_token[None, :], other=0.0)
            spread = tl.broadcast_to(factor[:, None, :, None], (TILES, BLOCK_N // TILES, BLOCK_K // 32, 32))
            out = dot(unpack_e4m3(raw, tl.reshape(spread, (BLOCK_N, BLOCK_K))), x_tile, out)
            w += BLOCK_K
            scale += BLOCK_K // 32
            x += BLOCK_K
    else:
        # One part of the columns per warp.
        part = tl.arange(0, PARTS)[:, None, None] * SPAN
        w = w_ptr + n[None, :, None].to(tl.int64) * K + column[None, None, :] + part
        scale = scale_ptr + tile_row[None, :, None] * (K // 32) + tile_column[None, None, :] + part // 32
        x = x_ptr + token[None, None, :].to(tl.int64) * token_stride + column[None, :, None] + part
        sums = tl.zeros((PARTS, BLOCK_N, BLOCK_T), tl.float32)
        for _ in range(SPAN // BLOCK_K):
            raw = tl.load(w)
            factor = e4m3_factor(tl.load(scale))
            x_tile = tl.load(x, mask=is_token[None, None, :], other=0.0)
            spread = tl.broadcast_to(factor[:, :, None, :, None], (PARTS, TILES, BLOCK_N // TILES, BLOCK_K // 32, 32))
            sums = dot(unpack_e4m3(raw, tl.reshape(spread, (PARTS, BLOCK_N, BLOCK_K))), x_tile, sums)
            w += BLOCK_K
            scale += BLOCK_K // 32
            x += BLOCK_K
        out = tl.sum(sums, 0)
    to = out_ptr + token[None, :].to(tl.int64) * N + n[:, None]
    tl.store(to, narrow(out * RESTORE, out_ptr.dtype.element_ty), mask=is_token[None, :])
