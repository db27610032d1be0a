# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the gate, and the experts over tokens sorted by expert. Source: design note deepseek-v41 §3.9."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whalefall.kernels.gemm.reference import linear_fp8_tile
from whalefall.kernels.moe import cases
from whalefall.kernels.quant.reference import dequantize_mxfp4
from whalefall.kernels.registry import op


@op("moe.gate", cases=cases.logits)
def gate(logits_TE: Tensor, bias_E: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Choose k experts per token by sqrt(softplus(logit)) + bias, and weigh them by the unbiased score.

    Args:
        logits_TE: float32.
        scale: multiplies the renormalised weights.
    Returns:
        expert_TA int64 in falling order of biased score, ties to the lower id; weight_TA float32.
    """
    score_TE = torch.nn.functional.softplus(logits_TE, threshold=20.0).sqrt()
    expert_TA = (score_TE + bias_E).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen_TA = score_TE.gather(-1, expert_TA)
    return expert_TA, chosen_TA / (chosen_TA.sum(-1, keepdim=True) + 1e-20) * scale


@op("moe.clamped_swiglu", cases=cases.swiglu)
def clamped_swiglu(gate_TF: Tensor, up_TF: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in float32, rounded once to the input dtype."""
    return (torch.nn.functional.silu(gate_TF.float().clamp_max(limit)) * up_TF.float().clamp(-limit, limit)).to(gate_TF.dtype)


@op("moe.experts_dense", cases=cases.dense)
def experts_dense(x_TH: Tensor, expert_TA: Tensor, weight_TA: Tensor, w13_EFH: Tensor, w2_EHF: Tensor, limit: float) -> Tensor:
    """Weighted sum of the chosen experts' outputs.

    Args:
        w13_EFH: gate projection above up projection, [E, 2F, H].
        w2_EHF: down projection [E, H, F].
    Returns:
        float32 [T, H]: experts are summed in float32, in rising expert id; the caller rounds once.
    """
    return _over_hit_experts(x_TH, expert_TA, weight_TA, limit, lambda e: (w13_EFH[e], w2_EHF[e]))


@op("moe.experts_mxfp4", cases=cases.mxfp4)
def experts_mxfp4(
    x_TH: Tensor,
    expert_TA: Tensor,
    weight_TA: Tensor,
    w13_EFh: Tensor,
    scale13_EFg: Tensor,
    w2_EHf: Tensor,
    scale2_EHg: Tensor,
    limit: float,
) -> Tensor:
    """As `experts_dense`, with MXFP4 experts that stay packed; only the experts that are hit are dequantised."""

    def unpack(e: int) -> tuple[Tensor, Tensor]:
        return dequantize_mxfp4(w13_EFh[e], scale13_EFg[e], x_TH.dtype), dequantize_mxfp4(w2_EHf[e], scale2_EHg[e], x_TH.dtype)

    return _over_hit_experts(x_TH, expert_TA, weight_TA, limit, unpack)


@op("moe.experts_mxfp4_onto", cases=cases.mxfp4_onto)
def experts_mxfp4_onto(
    base_TH: Tensor,
    x_TH: Tensor,
    expert_TA: Tensor,
    weight_TA: Tensor,
    w13_EFh: Tensor,
    scale13_EFg: Tensor,
    w2_EHf: Tensor,
    scale2_EHg: Tensor,
    limit: float,
) -> Tensor:
    """base + `experts_mxfp4`, added in float32 and rounded once to base's dtype: the shared expert's output goes in as base."""
    routed_TH = experts_mxfp4(x_TH, expert_TA, weight_TA, w13_EFh, scale13_EFg, w2_EHf, scale2_EHg, limit)
    return (routed_TH + base_TH.float()).to(base_TH.dtype)


@op("moe.swiglu_fp8_tile", cases=cases.fp8_swiglu)
def swiglu_fp8_tile(x_TH: Tensor, w1_FH: Tensor, scale1_fh: Tensor, w3_FH: Tensor, scale3_fh: Tensor, limit: float) -> Tensor:
    """`clamped_swiglu` of two products with FP8 tile weights, gate (w1) and up (w3): the first half of the shared expert."""
    return clamped_swiglu(linear_fp8_tile(x_TH, w1_FH, scale1_fh), linear_fp8_tile(x_TH, w3_FH, scale3_fh), limit)


def _over_hit_experts(
    x_TH: Tensor, expert_TA: Tensor, weight_TA: Tensor, limit: float, matrices: Callable[[int], tuple[Tensor, Tensor]]
) -> Tensor:
    per_token = expert_TA.shape[1]
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    sorted_expert, order = expert_TA.reshape(-1).sort(stable=True)
    hit, counts = torch.unique_consecutive(sorted_expert, return_counts=True)
    token_of = order // per_token
    weight_of = weight_TA.reshape(-1)[order]
    begin = 0
    for expert, count in zip(hit.tolist(), counts.tolist()):
        rows, weights = token_of[begin : begin + count], weight_of[begin : begin + count]
        begin += count
        w13_FH, w2_HF = matrices(expert)
        gate_up = torch.nn.functional.linear(x_TH[rows], w13_FH)
        gate_part, up_part = gate_up.chunk(2, dim=-1)
        y = torch.nn.functional.linear(clamped_swiglu(gate_part, up_part, limit), w2_HF)
        out_TH.index_add_(0, rows, y.float() * weights[:, None])
    return out_TH
