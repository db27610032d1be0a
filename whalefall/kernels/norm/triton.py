# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norm on a GPU: one program per row, the row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.norm.reference import rms_norm
from whalefall.kernels.registry import Device
from whalefall.kernels.triton_math import narrow


def _fits(x_TH: Tensor, weight_H: Tensor, eps: float) -> bool:
    return x_TH.dim() == 2 and x_TH.shape[1] <= 16384 and x_TH.stride(1) == 1


@rms_norm.impl("triton", needs=Device(sm=80), when=_fits)
def rms_norm_triton(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    rows, hidden = x_TH.shape
    out_TH = torch.empty(rows, hidden, dtype=x_TH.dtype, device=x_TH.device)
    if rows:
        block = triton.next_power_of_2(hidden)
        _rms_norm_kernel[(rows,)](x_TH, weight_H, out_TH, x_TH.stride(0), hidden, eps, BLOCK=block, num_warps=min(16, max(1, block // 512)))
    return out_TH


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, stride, hidden, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < hidden
    x = tl.load(x_ptr + row * stride + column, mask=is_column, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 0) / hidden
    y = x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * weight
    tl.store(out_ptr + row * hidden + column, narrow(y, out_ptr.dtype.element_ty), mask=is_column)
