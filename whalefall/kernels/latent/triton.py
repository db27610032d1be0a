# SPDX-License-Identifier: Apache-2.0
"""Cache entries on a GPU: norm, rotation and rounding with the rows in registers, one launch instead of three."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.latent.reference import Rounding, norm_rotate_round, rotate_round
from whalefall.kernels.quant.triton import MXFP4, MXFP8, NVFP4, fakequant
from whalefall.kernels.registry import Device
from whalefall.kernels.triton_math import narrow

_GPU = Device(sm=80)
_KIND = {Rounding.NONE: -1, Rounding.MXFP8: MXFP8.value, Rounding.MXFP4: MXFP4.value, Rounding.NVFP4: NVFP4.value}


def _fits(x: Tensor, cos_TF: Tensor, sin_TF: Tensor, rounding: int) -> bool:
    is_plain = x.stride(-1) == 1 and cos_TF.is_contiguous() and sin_TF.is_contiguous()
    return is_plain and x.shape[-1] in (32, 64, 128, 256, 512, 1024)


@rotate_round.impl("triton", needs=_GPU, when=_fits)
def rotate_round_triton(x: Tensor, cos_TF: Tensor, sin_TF: Tensor, rounding: int) -> Tensor:
    return _launch(x, None, 0.0, cos_TF, sin_TF, rounding)


def _fits_norm(x_TD: Tensor, weight_D: Tensor, eps: float, cos_TF: Tensor, sin_TF: Tensor, rounding: int) -> bool:
    return x_TD.dim() == 2 and _fits(x_TD, cos_TF, sin_TF, rounding)


@norm_rotate_round.impl("triton", needs=_GPU, when=_fits_norm)
def norm_rotate_round_triton(x_TD: Tensor, weight_D: Tensor, eps: float, cos_TF: Tensor, sin_TF: Tensor, rounding: int) -> Tensor:
    return _launch(x_TD, weight_D, eps, cos_TF, sin_TF, rounding)


def _launch(x: Tensor, weight_D: Tensor | None, eps: float, cos_TF: Tensor, sin_TF: Tensor, rounding: int) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    heads, dim = (1 if x.dim() == 2 else x.shape[1]), x.shape[-1]
    rows = min(triton.next_power_of_2(heads), max(1, 2048 // dim))
    _entry_kernel[(x.shape[0], triton.cdiv(heads, rows))](
        x,
        weight_D,
        cos_TF,
        sin_TF,
        out,
        x.stride(0),
        0 if x.dim() == 2 else x.stride(1),
        heads,
        eps,
        HAS_NORM=weight_D is not None,
        KIND=_KIND[Rounding(rounding)],
        GROUP=16 if rounding == Rounding.NVFP4 else 32,
        DIM=dim,
        PAIRS=cos_TF.shape[-1],
        ROWS=rows,
        num_warps=4 if rows * dim >= 1024 else 1,
    )
    return out


@triton.jit
def _entry_kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    token_stride,
    head_stride,
    heads,
    eps,
    HAS_NORM: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    inside = (head < heads)[:, None]
    x = tl.load(x_ptr + token * token_stride + head[:, None] * head_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        weight = tl.load(weight_ptr + column).to(tl.float32)[None, :]
        factor = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 1) / DIM + eps))
        x = narrow(x * factor[:, None] * weight, out_ptr.dtype.element_ty).to(tl.float32)
    pair = tl.arange(0, DIM // 2) - (DIM // 2 - PAIRS)
    cos = tl.load(cos_ptr + token * PAIRS + pair, mask=pair >= 0, other=1.0)[None, :]
    sin = tl.load(sin_ptr + token * PAIRS + pair, mask=pair >= 0, other=0.0)[None, :]
    real, imaginary = tl.split(tl.reshape(x, (ROWS, DIM // 2, 2)))
    turned = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)
    y = narrow(tl.reshape(turned, (ROWS, DIM)), out_ptr.dtype.element_ty)
    if KIND >= 0:
        groups = tl.reshape(y.to(tl.float32), (ROWS * DIM // GROUP, GROUP))
        rounded = fakequant(groups, tl.max(tl.abs(groups), 1)[:, None], KIND)
        y = narrow(tl.reshape(rounded, (ROWS, DIM)), out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * heads + head[:, None]) * DIM + column[None, :], y, mask=inside)
