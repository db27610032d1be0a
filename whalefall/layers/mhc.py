# SPDX-License-Identifier: Apache-2.0
"""HyperConnection: the parameters that mix the residual streams around one sublayer (design note deepseek-v41 §3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.kernels import mhc
from whalefall.layers.parametric import Parametric


class HyperConnection(Parametric):
    """fn, base and scale of one sublayer; float32 always."""

    fn: Tensor
    base: Tensor
    scale: Tensor

    def __init__(self, streams: int, hidden_size: int, *, eps: float, hc_eps: float, iterations: int, device: torch.device) -> None:
        super().__init__()
        self.eps, self.hc_eps, self.iterations = eps, hc_eps, iterations
        rows = streams * (2 + streams)
        self.declare("fn", (rows, streams * hidden_size), torch.float32, device)
        self.declare("base", (rows,), torch.float32, device)
        self.declare("scale", (3,), torch.float32, device)

    def mixes(self, streams_TSH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(pre_TS, post_TS, comb_TSS) of these streams."""
        return mhc.mixes(streams_TSH, self.fn, self.base, self.scale, self.eps, self.hc_eps, self.iterations)
