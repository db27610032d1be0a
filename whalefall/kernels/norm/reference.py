# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation. Source: design note deepseek-v41 §3.0."""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.kernels.norm import cases
from whalefall.kernels.registry import op


@op("norm.rms_norm", cases=cases.rows_by_hidden)
def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x**2) + eps) * weight over the last dimension, computed in float32 and rounded once to x's dtype."""
    x32_TH = x_TH.float()
    return (x32_TH * torch.rsqrt(x32_TH.square().mean(-1, keepdim=True) + eps) * weight_H.float()).to(x_TH.dtype)
