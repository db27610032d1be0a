# SPDX-License-Identifier: Apache-2.0
"""Pooling of a group of tokens into one compressed entry. Source: design note deepseek-v41 §3.5."""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.kernels.compress import cases
from whalefall.kernels.registry import op


@op("compress.pool_group", cases=cases.pooled)
def pool_group(values_TrD: Tensor, gates_TrD: Tensor) -> Tensor:
    """Per channel, the softmax of the gates over the r tokens of the group weighs their values. float32 in and out."""
    return (torch.softmax(gates_TrD, dim=1) * values_TrD).sum(1)
