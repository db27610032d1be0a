# SPDX-License-Identifier: Apache-2.0
"""Rotation on a GPU: one pass that copies what passes through and turns the rest."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.registry import Device
from whalefall.kernels.rope.reference import rotate
from whalefall.kernels.triton_math import narrow


def _fits(x: Tensor, cos_TF: Tensor, sin_TF: Tensor, inverse: bool = False) -> bool:
    return x.stride(-1) == 1 and cos_TF.stride(-1) == sin_TF.stride(-1) == 1 and x.shape[-1] <= 4096


@rotate.impl("triton", needs=Device(sm=80), when=_fits)
def rotate_triton(x: Tensor, cos_TF: Tensor, sin_TF: Tensor, inverse: bool = False) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    heads, dim = (1 if x.dim() == 2 else x.shape[1]), x.shape[-1]
    columns = triton.next_power_of_2(dim)
    rows = min(triton.next_power_of_2(heads), max(1, 4096 // columns))
    _rotate_kernel[(x.shape[0], triton.cdiv(heads, rows))](
        x,
        cos_TF,
        sin_TF,
        out,
        x.stride(0),
        0 if x.dim() == 2 else x.stride(1),
        cos_TF.stride(0),
        sin_TF.stride(0),
        heads,
        -1.0 if inverse else 1.0,
        DIM=dim,
        TURNED=2 * cos_TF.shape[-1],
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4 if rows * columns >= 1024 else 1,
    )
    return out


@triton.jit
def _rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    heads,
    sign,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    turned = column - (DIM - TURNED)
    is_turned = (turned >= 0) & (column < DIM)
    inside = (head < heads)[:, None] & (column < DIM)[None, :]
    x = tl.load(x_ptr + token * token_stride + head[:, None] * head_stride + column[None, :], mask=inside, other=0.0)
    # The other part of the same complex number: its neighbour.
    partner = turned + 1 - 2 * (turned % 2) + (DIM - TURNED)
    other = tl.load(
        x_ptr + token * token_stride + head[:, None] * head_stride + partner[None, :], mask=inside & is_turned[None, :], other=0.0
    ).to(tl.float32)
    cos = tl.load(cos_ptr + token * cos_stride + turned // 2, mask=is_turned, other=1.0)[None, :]
    sin = tl.load(sin_ptr + token * sin_stride + turned // 2, mask=is_turned, other=0.0)[None, :] * sign
    y = x.to(tl.float32) * cos + other * tl.where((turned % 2 == 0)[None, :], -sin, sin)
    to = out_ptr + (token * heads + head[:, None]) * DIM + column[None, :]
    tl.store(to, narrow(y, out_ptr.dtype.element_ty), mask=inside)
