# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities equal log-softmax of the raw logits, in an order that does not depend on luck."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from whalefall.runtime.sampling import logprobs
from whalefall.runtime.sampling.logprobs import logprobs_of

VOCAB = 50


def some_logits() -> torch.Tensor:
    return 2 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3))


def test_values_are_the_log_softmax_in_falling_order() -> None:
    logits_LV, ids_L = some_logits(), torch.arange(6)
    expected_LV = logits_LV.double().log_softmax(-1)
    for row, token in enumerate(logprobs_of(logits_LV, ids_L, np.full(6, 5)).tokens()):
        assert token.token_id == row
        assert token.logprob == pytest.approx(expected_LV[row, row].item(), abs=1e-5)
        assert token.rank == 1 + int((expected_LV[row] > expected_LV[row, row]).sum())
        best = expected_LV[row].topk(5)
        assert token.top_ids is not None
        assert token.top_ids.tolist() == best.indices.tolist()
        assert token.top_logprobs.tolist() == pytest.approx(best.values.tolist(), abs=1e-5)
        assert np.exp(token.top_logprobs).sum() <= 1


def test_equal_logits_are_listed_by_rising_id() -> None:
    (token,) = logprobs_of(torch.zeros(1, VOCAB), torch.tensor([4]), np.array([3])).tokens()
    assert token.rank == 5
    assert token.top_ids is not None
    assert token.top_ids.tolist() == [0, 1, 2]


def test_rows_may_ask_for_different_amounts() -> None:
    logits_LV = some_logits()[:4]
    tokens = logprobs_of(logits_LV, torch.zeros(4, dtype=torch.int64), np.array([0, -1, 2, 10_000])).tokens()
    assert [len(token.top_logprobs) for token in tokens] == [0, VOCAB, 2, VOCAB]
    assert [token.top_ids is None for token in tokens] == [False, True, False, False]
    assert tokens[1].top_logprobs == pytest.approx(logits_LV[1].log_softmax(-1).numpy(), abs=1e-6)
    assert tokens[3].top_ids is not None
    assert sorted(tokens[3].top_ids.tolist()) == list(range(VOCAB))


def test_tiles_do_not_change_values(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = np.array([2, -1, 0, 4, -1, 1])
    whole = logprobs_of(some_logits(), torch.arange(6), wanted).tokens()
    monkeypatch.setattr(logprobs, "TILE_BYTES", 2 * 4 * VOCAB)
    tiled = logprobs_of(some_logits(), torch.arange(6), wanted).tokens()
    assert [(t.logprob, t.rank, t.top_logprobs.tolist()) for t in tiled] == [(t.logprob, t.rank, t.top_logprobs.tolist()) for t in whole]


def test_masked_ids_have_minus_infinity_and_come_last() -> None:
    logits_LV = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    (token,) = logprobs_of(logits_LV, torch.tensor([1]), np.array([4])).tokens()
    assert token.logprob == -math.inf
    assert token.rank == 3
    assert token.top_ids is not None
    assert token.top_ids.tolist() == [2, 0, 1, 3]


def test_no_rows_give_no_tokens() -> None:
    assert logprobs_of(torch.zeros(0, VOCAB), torch.zeros(0, dtype=torch.int64), np.zeros(0, np.int64)).tokens() == []
