# SPDX-License-Identifier: Apache-2.0
"""Rounded caches and dequantised weights on a GPU. Rounding is arithmetic in float32, so that it is the same on every device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.quant.reference import dequantize_fp8_tile, fakequant_mxfp4, fakequant_mxfp8, fakequant_nvfp4
from whalefall.kernels.registry import Device
from whalefall.kernels.triton_math import exponent_ceil, narrow, power_of_two, round_e2m1, round_e4m3

_GPU = Device(sm=80)
MXFP8, MXFP4, NVFP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def _has_rows(x_TD: Tensor) -> bool:
    return x_TD.is_contiguous() or (x_TD.dim() == 2 and x_TD.stride(1) == 1)


def _fakequant(x_TD: Tensor, kind: int, group: int) -> Tensor:
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    columns = x_TD.shape[-1]
    num_groups = x_TD.numel() // group
    if num_groups:
        stride = x_TD.stride(0) if x_TD.dim() == 2 else columns
        block = min(32, triton.next_power_of_2(num_groups))
        _fakequant_kernel[(triton.cdiv(num_groups, block),)](
            x_TD, out_TD, num_groups, stride, GROUPS=columns // group, GROUP=group, KIND=kind, BLOCK=block, num_warps=2
        )
    return out_TD


@fakequant_mxfp8.impl("triton", needs=_GPU, when=_has_rows)
def fakequant_mxfp8_triton(x_TD: Tensor) -> Tensor:
    return _fakequant(x_TD, MXFP8.value, 32)


@fakequant_mxfp4.impl("triton", needs=_GPU, when=_has_rows)
def fakequant_mxfp4_triton(x_TD: Tensor) -> Tensor:
    return _fakequant(x_TD, MXFP4.value, 32)


@fakequant_nvfp4.impl("triton", needs=_GPU, when=_has_rows)
def fakequant_nvfp4_triton(x_TD: Tensor) -> Tensor:
    return _fakequant(x_TD, NVFP4.value, 16)


@triton.jit
def fakequant(x, amax, KIND: tl.constexpr):
    """float32 values rounded to the format and back; amax is their group's largest magnitude, in a shape that broadcasts."""
    if KIND == NVFP4:
        scale = round_e4m3(tl.minimum(tl.maximum(tl.div_rn(amax, tl.zeros_like(amax) + 6.0), 0.001953125), 448.0))
        return round_e2m1(tl.div_rn(x, tl.zeros_like(x) + scale)) * scale
    elif KIND == MXFP8:
        exponent = exponent_ceil(tl.div_rn(tl.maximum(amax, 1e-4), tl.zeros_like(amax) + 448.0))
        return round_e4m3(x * power_of_two(-exponent)) * power_of_two(exponent)
    else:
        smallest = 7.052966104933725e-38  # 6 * 2**-126
        exponent = exponent_ceil(tl.div_rn(tl.maximum(amax, smallest), tl.zeros_like(amax) + 6.0))
        return round_e2m1(x * power_of_two(-exponent)) * power_of_two(exponent)


@triton.jit
def _fakequant_kernel(
    x_ptr, out_ptr, num_groups, stride, GROUPS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (group < num_groups)[:, None]
    lane = tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + ((group // GROUPS) * stride + (group % GROUPS) * GROUP)[:, None] + lane, mask=inside, other=0.0).to(tl.float32)
    y = fakequant(x, tl.max(tl.abs(x), 1)[:, None], KIND)
    tl.store(out_ptr + group[:, None] * GROUP + lane, narrow(y, out_ptr.dtype.element_ty), mask=inside)


def _is_plain(w_NK: Tensor, scale_nk: Tensor, dtype: torch.dtype) -> bool:
    return w_NK.stride(1) == 1 and scale_nk.is_contiguous() and scale_nk.dtype == torch.uint8


@dequantize_fp8_tile.impl("triton", needs=_GPU, when=_is_plain)
def dequantize_fp8_tile_triton(w_NK: Tensor, scale_nk: Tensor, dtype: torch.dtype) -> Tensor:
    n, k = w_NK.shape
    out_NK = torch.empty(n, k, dtype=dtype, device=w_NK.device)
    if out_NK.numel():
        grid = (triton.cdiv(k, 256), triton.cdiv(n, 32))
        _dequantize_kernel[grid](w_NK.view(torch.uint8), scale_nk, out_NK, n, k, w_NK.stride(0), scale_nk.shape[1], num_warps=4)
    return out_NK


@triton.jit
def _dequantize_kernel(w_ptr, scale_ptr, out_ptr, n_rows, k_columns, stride, scale_stride):
    """32 rows, 8 tiles wide. E4M3 bits in a float32 are the value times 2**-120."""
    row = tl.program_id(1) * 32 + tl.arange(0, 32)
    column = tl.program_id(0) * 256 + tl.arange(0, 256)
    inside = (row < n_rows)[:, None] & (column < k_columns)[None, :]
    raw = tl.load(w_ptr + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + tl.program_id(1) * scale_stride + column // 32, mask=column < k_columns, other=127).to(tl.int32)
    value = (((raw & 0x80) << 24) | ((raw & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    y = value * (power_of_two(tl.maximum(scale - 127, -126)) * tl.where(scale == 0, 0.5, 1.0))[None, :]
    tl.store(out_ptr + row[:, None].to(tl.int64) * k_columns + column[None, :], narrow(y, out_ptr.dtype.element_ty), mask=inside)
