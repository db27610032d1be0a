# SPDX-License-Identifier: Apache-2.0
"""Writes into the pools on a GPU: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.kv_store.reference import store_rows
from whalefall.kernels.registry import Device
from whalefall.kernels.triton_math import narrow


def _fits(pool_RD: Tensor, rows_T: Tensor, values_TD: Tensor) -> bool:
    is_plain = pool_RD.dim() == values_TD.dim() == 2 and pool_RD.stride(1) == values_TD.stride(1) == 1
    return is_plain and pool_RD.dtype in (torch.float32, torch.bfloat16) and pool_RD.shape[1] <= 8192


@store_rows.impl("triton", needs=Device(sm=80), when=_fits)
def store_rows_triton(pool_RD: Tensor, rows_T: Tensor, values_TD: Tensor) -> None:
    tokens, dim = values_TD.shape
    if tokens:
        block = triton.next_power_of_2(dim)
        _store_kernel[(tokens,)](
            pool_RD, rows_T, values_TD, pool_RD.stride(0), values_TD.stride(0), dim, BLOCK=block, num_warps=min(4, max(1, block // 256))
        )


@triton.jit
def _store_kernel(pool_ptr, rows_ptr, values_ptr, pool_stride, values_stride, dim, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + token).to(tl.int64)
    value = tl.load(values_ptr + token * values_stride + column, mask=column < dim, other=0.0)
    if pool_ptr.dtype.element_ty != values_ptr.dtype.element_ty:
        value = narrow(value.to(tl.float32), pool_ptr.dtype.element_ty)
    tl.store(pool_ptr + row * pool_stride + column, value, mask=column < dim)
