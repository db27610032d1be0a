# SPDX-License-Identifier: Apache-2.0
"""Products with float32 weights and float32 results on a GPU, for gate scores and compressor inputs: few weights, all digits.

Each float32 factor goes to the matrix units as parts of 10 bits that are multiplied separately (tf32x3). The product stands on its side as
in `triton_fp8`; programs share the columns of a weight with few rows, and a second launch adds their sums in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.gemm.reference import linear_float32
from whalefall.kernels.registry import Device
from whalefall.kernels.triton_math import INTERPRETED

ROWS = 32
"""Weight rows a program."""


def parts_for(tokens: int, n: int, k: int) -> int:
    """How many programs share a row's columns: enough programs for every multiprocessor, whole steps each."""
    programs = triton.cdiv(n, ROWS) * triton.cdiv(tokens, 64)
    return next((p for p in (16, 8, 4, 2) if programs * p <= 528 and k % (64 * p) == 0), 1)


def _fits(x_TK: Tensor, w_NK: Tensor) -> bool:
    is_plain = x_TK.stride(1) == 1 and w_NK.is_contiguous() and x_TK.shape[1] % 64 == 0
    return is_plain and w_NK.dtype == torch.float32 and x_TK.dtype in (torch.float32, torch.bfloat16)


@linear_float32.impl("triton", needs=Device(sm=80), when=_fits)
def linear_float32_triton(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    (tokens, k), n = x_TK.shape, w_NK.shape[0]
    if not tokens:
        return torch.empty(0, n, dtype=torch.float32, device=x_TK.device)
    parts = parts_for(tokens, n, k)
    sums_PTN = torch.empty(parts, tokens, n, dtype=torch.float32, device=x_TK.device)
    block_t = next((size for size in (16, 32) if tokens <= size), 64)
    _linear_float32_kernel[(triton.cdiv(n, ROWS), triton.cdiv(tokens, block_t), parts)](
        x_TK,
        w_NK,
        sums_PTN,
        tokens,
        n,
        x_TK.stride(0),
        K=k,
        SPAN=k // parts,
        BLOCK_T=block_t,
        BLOCK_N=ROWS,
        BLOCK_K=64,
        num_warps=4 if block_t > 16 else 2,
        num_stages=3,
    )
    return sums_PTN[0] if parts == 1 else sums_PTN.sum(0)


@triton.jit
def _linear_float32_kernel(
    x_ptr,
    w_ptr,
    sums_ptr,
    tokens,
    n_rows,
    x_stride,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(2) * SPAN + tl.arange(0, BLOCK_K)
    w = w_ptr + n[:, None].to(tl.int64) * K + column[None, :]
    x = x_ptr + token[None, :].to(tl.int64) * x_stride + column[:, None]
    out = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for _ in range(SPAN // BLOCK_K):
        w_tile = tl.load(w, mask=(n < n_rows)[:, None], other=0.0)
        x_tile = tl.load(x, mask=(token < tokens)[None, :], other=0.0).to(tl.float32)
        if INTERPRETED:
            out += tl.dot(w_tile, x_tile)
        else:
            out = tl.dot(w_tile, x_tile, out, input_precision="tf32x3")
        w += BLOCK_K
        x += BLOCK_K
    to = sums_ptr + (tl.program_id(2).to(tl.int64) * tokens + token[None, :]) * n_rows + n[:, None]
    tl.store(to, out, mask=(n < n_rows)[:, None] & (token < tokens)[None, :])
