# SPDX-License-Identifier: Apache-2.0
"""Sparse attention: the sink, absent rows, and tiles."""

from __future__ import annotations

import math

import pytest
import torch

from whalefall.kernels.attention import cases, reference, sparse_mqa
from whalefall.kernels.cases import normal


def test_the_sink_takes_its_share_and_gives_nothing() -> None:
    key_MD = normal(1, 8)
    out_TND = sparse_mqa(torch.zeros(1, 3, 8), key_MD, torch.tensor([[0]]), None, None, torch.tensor([0.0, 2.0, -50.0]), 1.0)
    for head, sink in enumerate((0.0, 2.0, -50.0)):
        assert torch.allclose(out_TND[0, head], key_MD[0] / (1 + math.exp(sink)))


def test_the_sink_is_not_scaled() -> None:
    q_TND, key_MD = torch.full((1, 1, 4), 2.0), torch.full((1, 4), 3.0)
    out_TND = sparse_mqa(q_TND, key_MD, torch.tensor([[0]]), None, None, torch.tensor([1.0]), 0.125)
    share = math.exp(24 * 0.125) / (math.exp(24 * 0.125) + math.e)
    assert out_TND[0, 0].tolist() == pytest.approx([3 * share] * 4)


@pytest.mark.parametrize("left_over", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_absent_key_may_hold_anything(left_over: float, dtype: torch.dtype) -> None:
    """-1 is read as row 0 on the way; that row belongs to somebody else."""
    q_TND, window_MD, main_CD = normal(3, 2, 16, dtype=dtype), normal(6, 16, seed=1, dtype=dtype), normal(6, 16, seed=2, dtype=dtype)
    window_TW, main_TK = torch.tensor([[-1, 3, 5]] * 3), torch.tensor([[2, -1], [-1, -1], [4, 1]])
    clean = sparse_mqa(q_TND, window_MD, window_TW, main_CD, main_TK, torch.zeros(2), 0.25)
    window_MD[0], main_CD[0] = left_over, left_over
    assert torch.equal(sparse_mqa(q_TND, window_MD, window_TW, main_CD, main_TK, torch.zeros(2), 0.25), clean)


def test_absent_keys_equal_a_shorter_list() -> None:
    q_TND, window_MD = normal(1, 2, 16), normal(6, 16, seed=1)
    long = sparse_mqa(q_TND, window_MD, torch.tensor([[-1, -1, 3, 5]]), window_MD, torch.tensor([[-1, 2]]), torch.zeros(2), 0.25)
    short = sparse_mqa(q_TND, window_MD, torch.tensor([[3, 5]]), window_MD, torch.tensor([[2]]), torch.zeros(2), 0.25)
    assert torch.allclose(long, short, atol=1e-6)


def test_without_any_key_the_output_is_zero() -> None:
    out_TND = sparse_mqa(normal(2, 2, 8), torch.full((3, 8), torch.nan), torch.full((2, 3), -1), None, None, torch.zeros(2), 1.0)
    assert out_TND.count_nonzero() == 0


def test_large_logits_do_not_overflow() -> None:
    q_TND = torch.full((1, 1, 4), 100.0)
    key_MD = torch.stack((torch.full((4,), 50.0), torch.full((4,), -50.0)))
    out_TND = sparse_mqa(q_TND, key_MD, torch.tensor([[0, 1]]), None, None, torch.zeros(1), 1.0)
    assert torch.equal(out_TND[0, 0], key_MD[0])
    only_low = sparse_mqa(q_TND, key_MD, torch.tensor([[1, 1]]), None, None, torch.zeros(1), 1.0)
    assert only_low.count_nonzero() == 0  # the sink takes all


@pytest.mark.parametrize("tile_bytes", [1, 5_000, 20_000])
def test_tiles_of_tokens_change_nothing(tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for args in cases.gathered():
        whole = sparse_mqa(*args)
        monkeypatch.setattr(reference, "_TILE_BYTES", tile_bytes)
        assert torch.allclose(sparse_mqa(*args).float(), whole.float(), atol=1e-5 if args[0].dtype == torch.float32 else 2e-2)
        monkeypatch.undo()
