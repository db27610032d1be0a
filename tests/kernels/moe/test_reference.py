# SPDX-License-Identifier: Apache-2.0
"""The gate's choice and weights, the clamps, and packed experts against dense ones."""

from __future__ import annotations

import math

import pytest
import torch

from whalefall.kernels import moe
from whalefall.kernels.cases import normal
from whalefall.kernels.moe import cases
from whalefall.kernels.quant import dequantize_mxfp4


def test_the_bias_chooses_but_does_not_weigh() -> None:
    logits_TE = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    expert_TA, weight_TA = moe.gate(logits_TE, torch.tensor([0.0, 0.0, 0.0, 9.0]), 2, 1.5)
    assert expert_TA.tolist() == [[3, 0]]
    low, high = (math.sqrt(math.log1p(math.exp(v))) for v in (-1.0, 2.0))
    assert weight_TA[0].tolist() == pytest.approx([1.5 * low / (low + high), 1.5 * high / (low + high)])


def test_ties_go_to_the_lower_expert() -> None:
    assert moe.gate(torch.zeros(2, 16), torch.zeros(16), 6, 1.5)[0].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    bias_E = torch.zeros(16)
    bias_E[9] = bias_E[4] = 1
    assert moe.gate(torch.zeros(1, 16), bias_E, 3, 1.5)[0].tolist() == [[4, 9, 0]]


def test_softplus_is_the_identity_above_twenty() -> None:
    _, weight_TA = moe.gate(torch.tensor([[100.0, 25.0]]), torch.zeros(2), 2, 1.0)
    assert weight_TA[0].tolist() == pytest.approx([10 / 15, 5 / 15])


def test_weights_of_hopeless_scores_do_not_explode() -> None:
    _, weight_TA = moe.gate(torch.full((1, 4), -300.0), torch.zeros(4), 2, 1.5)
    assert weight_TA.tolist() == [[0.0, 0.0]]  # 0 / 1e-20, not 0 / 0


def test_the_gate_part_is_clamped_above_only_and_the_up_part_on_both_sides() -> None:
    gate_TF, up_TF = torch.tensor([[50.0, -50.0, 1.0, 1.0]]), torch.tensor([[1.0, 1.0, 50.0, -50.0]])
    silu_1 = 1 / (1 + math.exp(-1))
    found = moe.clamped_swiglu(gate_TF, up_TF, 10.0)[0].tolist()
    assert found == pytest.approx([10 / (1 + math.exp(-10)), -50 * math.exp(-50), 10 * silu_1, -10 * silu_1], abs=1e-6)


def test_packed_experts_equal_dense_ones_bit_for_bit() -> None:
    for x_TH, expert_TA, weight_TA, w13, scale13, w2, scale2, limit in cases.mxfp4():
        dense13, dense2 = (
            torch.stack([dequantize_mxfp4(part, scale, x_TH.dtype) for part, scale in zip(w, s)]) for w, s in ((w13, scale13), (w2, scale2))
        )
        packed = moe.experts_mxfp4(x_TH, expert_TA, weight_TA, w13, scale13, w2, scale2, limit)
        assert torch.equal(packed, moe.experts_dense(x_TH, expert_TA, weight_TA, dense13, dense2, limit))


def test_an_expert_that_nobody_chose_may_hold_anything() -> None:
    w13_EFH, w2_EHF = normal(3, 16, 32), normal(3, 32, 8, seed=1)
    w13_EFH[1], w2_EHF[1] = torch.nan, torch.nan
    out_TH = moe.experts_dense(normal(4, 32), torch.tensor([[0, 2]] * 4), torch.ones(4, 2), w13_EFH, w2_EHF, 10.0)
    assert out_TH.isfinite().all()


def test_a_token_with_nan_keeps_it_to_itself() -> None:
    x_TH = normal(4, 32)
    expert_TA, weights = torch.tensor([[0, 1]] * 4), (normal(2, 16, 32, seed=2), normal(2, 32, 8, seed=1))
    clean = moe.experts_dense(x_TH, expert_TA, torch.ones(4, 2), *weights, 10.0)
    x_TH[2] = torch.nan
    dirty = moe.experts_dense(x_TH, expert_TA, torch.ones(4, 2), *weights, 10.0)
    assert dirty[2].isnan().all()
    assert torch.equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])
