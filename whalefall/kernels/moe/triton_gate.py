# SPDX-License-Identifier: Apache-2.0
"""The gate and the SwiGLU on a GPU: one program per token chooses and weighs its experts; elementwise for the SwiGLU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.moe.reference import clamped_swiglu, gate
from whalefall.kernels.registry import Device
from whalefall.kernels.triton_math import narrow


def _is_float32(logits_TE: Tensor, bias_E: Tensor, k: int, scale: float) -> bool:
    return logits_TE.dtype == torch.float32 and logits_TE.stride(1) == 1 and logits_TE.shape[1] <= 1024


@gate.impl("triton", needs=Device(sm=80), when=_is_float32)
def gate_triton(logits_TE: Tensor, bias_E: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    tokens, num_experts = logits_TE.shape
    expert_TA = torch.empty(tokens, k, dtype=torch.int64, device=logits_TE.device)
    weight_TA = torch.empty(tokens, k, dtype=torch.float32, device=logits_TE.device)
    if tokens:
        _gate_kernel[(tokens,)](
            logits_TE,
            bias_E,
            expert_TA,
            weight_TA,
            logits_TE.stride(0),
            scale,
            NUM_EXPERTS=num_experts,
            K=k,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(k),
            num_warps=1,
        )
    return expert_TA, weight_TA


@triton.jit
def _gate_kernel(
    logits_ptr,
    bias_ptr,
    expert_ptr,
    weight_ptr,
    stride,
    scale,
    NUM_EXPERTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    logit = tl.load(logits_ptr + token * stride + e, mask=e < NUM_EXPERTS, other=0.0)
    # softplus as torch has it: the identity above 20; log1p(z) = log(1 + z) * z / ((1 + z) - 1) keeps the digits of a small z.
    z = tl.exp(tl.minimum(logit, 20.0))
    one_z = 1.0 + z
    soft = tl.where(one_z == 1.0, z, tl.log(one_z) * tl.div_rn(z, tl.where(one_z == 1.0, 1.0, one_z - 1.0)))
    score = tl.sqrt_rn(tl.where(logit > 20.0, logit, soft))
    biased = tl.where(e < NUM_EXPERTS, score + tl.load(bias_ptr + e, mask=e < NUM_EXPERTS, other=0.0), float("-inf"))
    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int64)
    chosen_score = tl.zeros((BLOCK_K,), tl.float32)
    for i in tl.static_range(K):
        best = tl.max(biased, 0)
        expert = tl.min(tl.where(biased == best, e, BLOCK_E), 0)
        is_best = e == expert
        chosen = tl.where(place == i, expert.to(tl.int64), chosen)
        chosen_score = tl.where(place == i, tl.sum(tl.where(is_best, score, 0.0), 0), chosen_score)
        biased = tl.where(is_best, float("-inf"), biased)
    weight = tl.div_rn(chosen_score, tl.zeros_like(chosen_score) + (tl.sum(chosen_score, 0) + 1e-20)) * scale
    tl.store(expert_ptr + token * K + place, chosen, mask=place < K)
    tl.store(weight_ptr + token * K + place, weight, mask=place < K)


def _has_unit_columns(gate_TF: Tensor, up_TF: Tensor, limit: float) -> bool:
    return gate_TF.stride(-1) == up_TF.stride(-1) == 1 and gate_TF.dim() == 2


@clamped_swiglu.impl("triton", needs=Device(sm=80), when=_has_unit_columns)
def clamped_swiglu_triton(gate_TF: Tensor, up_TF: Tensor, limit: float) -> Tensor:
    tokens, inner = gate_TF.shape
    out_TF = torch.empty(tokens, inner, dtype=gate_TF.dtype, device=gate_TF.device)
    if tokens:
        block = min(1024, triton.next_power_of_2(inner))
        grid = (tokens, triton.cdiv(inner, block))
        _swiglu_kernel[grid](gate_TF, up_TF, out_TF, gate_TF.stride(0), up_TF.stride(0), limit, inner, BLOCK=block, num_warps=4)
    return out_TF


@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, limit, inner, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < inner
    gate = tl.minimum(tl.load(gate_ptr + token * gate_stride + column, mask=is_column, other=0.0).to(tl.float32), limit)
    up = tl.load(up_ptr + token * up_stride + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    y = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + token * inner + column, narrow(y, out_ptr.dtype.element_ty), mask=is_column)
