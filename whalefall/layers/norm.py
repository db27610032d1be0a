# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with its weight kept in float32 (exact for a bfloat16 checkpoint)."""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.kernels import norm
from whalefall.layers.parametric import Parametric


class RMSNorm(Parametric):
    weight: Tensor

    def __init__(self, size: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.declare("weight", (size,), torch.float32, device)

    def forward(self, x_TH: Tensor) -> Tensor:
        return norm.rms_norm(x_TH, self.weight, self.eps)
