# SPDX-License-Identifier: Apache-2.0
"""Dense products on a GPU: the vendor's library, which is at home there.

bfloat16 times bfloat16 with a float32 result keeps the sums as they are accumulated: nothing is widened in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.kernels.gemm.reference import grouped_linear, linear, linear_float32
from whalefall.kernels.registry import Device

_GPU = Device(sm=80)


@linear.impl("cublas", needs=_GPU)
def linear_cublas(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    return torch.nn.functional.linear(x_TK, w_NK)


@grouped_linear.impl("cublas", needs=_GPU)
def grouped_linear_cublas(x_TGK: Tensor, w_GNK: Tensor) -> Tensor:
    return torch.bmm(x_TGK.transpose(0, 1), w_GNK.transpose(1, 2)).transpose(0, 1)


def _is_narrow(x_TK: Tensor, w_NK: Tensor) -> bool:
    return x_TK.dtype == w_NK.dtype == torch.bfloat16 and x_TK.shape[0] > 0


@linear_float32.impl("cublas", needs=_GPU, when=_is_narrow)
def linear_float32_cublas(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    return torch.mm(x_TK, w_NK.t(), out_dtype=torch.float32)
