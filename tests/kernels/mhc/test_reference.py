# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections: what Sinkhorn promises, and which way round the mixes go."""

from __future__ import annotations

import torch

from whalefall.kernels.cases import normal
from whalefall.kernels.compare import error
from whalefall.kernels.mhc import collapse, expand, mixes
from whalefall.kernels.mhc.reference import sinkhorn


def test_rows_and_columns_sum_to_one() -> None:
    comb_TSS = sinkhorn(normal(50, 4, 4), 1e-6, 20)
    assert (comb_TSS > 0).all()
    assert (comb_TSS.sum(1) - 1).abs().max() < 1e-5  # columns come last
    assert (comb_TSS.sum(2) - 1).abs().max() < 1e-3


def test_few_rounds_have_not_settled() -> None:
    logits_TSS = 2 * normal(50, 4, 4)
    rows = [float((sinkhorn(logits_TSS, 1e-6, rounds).sum(2) - 1).abs().max()) for rounds in (1, 5, 20)]
    assert rows[0] > rows[1] > rows[2]


def test_large_logits_do_not_overflow() -> None:
    comb_TSS = sinkhorn(torch.tensor([[[300.0, 0, 0, 0], [0, 300, 0, 0], [0, 0, -300, 0], [0, 0, 0, 300]]]), 1e-6, 20)
    assert comb_TSS.isfinite().all()


def test_the_summed_index_is_the_first_of_comb() -> None:
    """A comb that sends stream 0 to stream 2 and nothing else."""
    comb_TSS = torch.zeros(1, 4, 4)
    comb_TSS[0, 0, 2] = 1
    streams_TSH = normal(1, 4, 8)
    out_TSH = expand(streams_TSH, torch.zeros(1, 8), torch.zeros(1, 4), comb_TSS)
    assert torch.equal(out_TSH[:, 2], streams_TSH[:, 0])
    assert out_TSH[:, [0, 1, 3]].count_nonzero() == 0


def test_a_transposed_comb_would_be_noticed() -> None:
    streams_TSH, y_TH, post_TS = normal(5, 4, 16), normal(5, 16, seed=1), normal(5, 4, seed=2)
    comb_TSS = sinkhorn(normal(5, 4, 4, seed=3), 1e-6, 20)
    right = expand(streams_TSH, y_TH, post_TS, comb_TSS)
    assert error(expand(streams_TSH, y_TH, post_TS, comb_TSS.transpose(1, 2).contiguous()), right) > 0.1


def test_pre_has_the_eps_and_post_has_not() -> None:
    streams_TSH = torch.zeros(1, 4, 8)
    base_M = torch.full((24,), -100.0)
    pre_TS, post_TS, comb_TSS = mixes(streams_TSH, normal(24, 32), base_M, torch.ones(3), 1e-20, 1e-6, 20)
    assert pre_TS.tolist() == torch.full((1, 4), 1e-6).tolist()
    assert float(post_TS.max()) < 1e-40
    assert (comb_TSS - 0.25).abs().max() < 1e-6  # equal logits, whatever their size


def test_the_size_of_the_streams_does_not_matter_above_the_eps() -> None:
    streams_TSH, fn_MF = normal(3, 4, 16), normal(24, 64, seed=1)
    parameters = fn_MF, normal(24, seed=2), torch.tensor([0.5, 0.5, 0.5])
    large = mixes(1000 * streams_TSH, *parameters, 1e-20, 1e-6, 20)
    small = mixes(1e-8 * streams_TSH, *parameters, 1e-20, 1e-6, 20)
    smaller_than_eps = mixes(1e-12 * streams_TSH, *parameters, 1e-20, 1e-6, 20)
    for a, b, c in zip(large, small, smaller_than_eps):
        assert error(b, a) < 1e-3
        assert error(c, a) > 1e-2


def test_a_one_hot_carry_takes_one_stream_unchanged() -> None:
    streams_TSH = normal(3, 4, 32, dtype=torch.bfloat16)
    for s in range(4):
        assert torch.equal(collapse(streams_TSH, torch.eye(4)[s].expand(3, 4)), streams_TSH[:, s])
