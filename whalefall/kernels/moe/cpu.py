# SPDX-License-Identifier: Apache-2.0
"""The experts on a CPU: all rows sorted by expert lie in one tensor, so that everything but the two products runs once for all experts.

With few rows the calls cost more than the arithmetic: two grouped products replace about fourteen small calls per expert. With many rows
the tensors of all experts leave the cache, and the loop of the reference wins.
Benchmark: benchmarks/kernels/cpu_experts.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.kernels.moe.reference import clamped_swiglu, experts_dense
from whalefall.kernels.registry import Device

_MAX_ROWS = 768
"""Rows times experts per token up to which the tensors of all experts stay near the cache."""


def _is_worth_it(x_TH: Tensor, expert_TA: Tensor, weight_TA: Tensor, w13_EFH: Tensor, w2_EHF: Tensor, limit: float) -> bool:
    # The grouped product takes rows of whole 16 bytes.
    is_aligned = all(size * x_TH.element_size() % 16 == 0 for size in w2_EHF.shape[1:])
    return is_aligned and 0 < expert_TA.numel() <= _MAX_ROWS


@experts_dense.impl("cpu_grouped", needs=Device(type="cpu"), when=_is_worth_it)
def experts_dense_cpu(x_TH: Tensor, expert_TA: Tensor, weight_TA: Tensor, w13_EFH: Tensor, w2_EHF: Tensor, limit: float) -> Tensor:
    tokens, per_token = expert_TA.shape
    expert_R = expert_TA.reshape(-1)
    order_R = expert_R.argsort(stable=True)
    ends_E = torch.bincount(expert_R, minlength=w13_EFH.shape[0]).cumsum(0).int()
    gate_up_RF = torch.nn.functional.grouped_mm(x_TH[order_R // per_token], w13_EFH.transpose(1, 2), offs=ends_E)
    gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
    inner_RF = clamped_swiglu(gate_RF, up_RF, limit)
    sorted_RH = torch.nn.functional.grouped_mm(inner_RF, w2_EHF.transpose(1, 2), offs=ends_E)
    y_RH = torch.empty_like(sorted_RH).index_copy_(0, order_R, sorted_RH)
    return torch.bmm(weight_TA[:, None], y_RH.view(tokens, per_token, -1).float()).squeeze(1)
