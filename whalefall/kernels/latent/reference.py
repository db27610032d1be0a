# SPDX-License-Identifier: Apache-2.0
"""Norm, rotation and rounding of cache entries and index queries, as compositions of the small ops.

Every step rounds to the activations' dtype, as the small ops do: an entry's codes are decisions that twins must share.
Source: design note deepseek-v41 §3.4-3.6.
"""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

from whalefall.kernels.latent import cases
from whalefall.kernels.norm.reference import rms_norm
from whalefall.kernels.quant.reference import fakequant_mxfp4, fakequant_mxfp8, fakequant_nvfp4
from whalefall.kernels.registry import op
from whalefall.kernels.rope.reference import rotate


class Rounding(IntEnum):
    """To which format an entry is rounded, and back."""

    NONE = 0
    MXFP8 = 1
    """Window rows."""
    MXFP4 = 2
    """Index keys and queries."""
    NVFP4 = 3
    """Main KV."""


_ROUND = {Rounding.MXFP8: fakequant_mxfp8, Rounding.MXFP4: fakequant_mxfp4, Rounding.NVFP4: fakequant_nvfp4}


@op("latent.rotate_round", cases=cases.rotated)
def rotate_round(x: Tensor, cos_TF: Tensor, sin_TF: Tensor, rounding: int) -> Tensor:
    """[T, D] or [T, N, D] rotated as by `rope.rotate`, then rounded; `rounding` is a `Rounding`."""
    x = rotate(x, cos_TF, sin_TF)
    return x if rounding == Rounding.NONE else _ROUND[Rounding(rounding)](x)


@op("latent.norm_rotate_round", cases=cases.normed)
def norm_rotate_round(x_TD: Tensor, weight_D: Tensor, eps: float, cos_TF: Tensor, sin_TF: Tensor, rounding: int) -> Tensor:
    """As `rotate_round`, of `norm.rms_norm` of the rows."""
    return rotate_round(rms_norm(x_TD, weight_D, eps), cos_TF, sin_TF, rounding)
