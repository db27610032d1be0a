# SPDX-License-Identifier: Apache-2.0
"""Each sampling op against a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from whalefall.kernels import sampling as ops
from whalefall.kernels.registry import all_ops
from whalefall.kernels.sampling import reference

few_values = st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 0.5, 1.0, 3.0])  # few, so that ties are common
rows = st.lists(few_values, min_size=1, max_size=12)


def in_order(row: list[float]) -> list[int]:
    """Ids by falling value, ties by rising id."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


@pytest.mark.parametrize("name", [name for name in all_ops() if name.startswith("sampling.")])
def test_every_op_runs_its_own_cases(name: str) -> None:
    found = all_ops()[name]
    assert found.cases is not None
    results = [found(*args) for args in found.cases()]
    assert len(results) >= 3


def test_argmax_takes_the_lower_id_and_reports_nan() -> None:
    ids_L, best_L = ops.argmax(torch.tensor([[1.0, 3.0, 3.0], [0.0, math.nan, 9.0], [-math.inf] * 3]))
    assert ids_L.tolist()[0] == 1
    assert best_L.tolist()[0] == 3.0
    assert math.isnan(best_L[1])
    assert best_L[2] == -math.inf


@settings(deadline=None)
@given(row=rows, data=st.data())
def test_top_ids_and_rank_agree_on_one_order(row: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(row)))
    scores_LV = torch.tensor([row])
    assert ops.top_ids(scores_LV, k).tolist() == [in_order(row)[:k]]
    ranks = [ops.rank(scores_LV, torch.tensor([i])).item() for i in range(len(row))]
    assert ranks == [in_order(row).index(i) + 1 for i in range(len(row))]


@settings(deadline=None)
@given(row=rows.filter(lambda r: max(r) > -math.inf), top_k=st.integers(1, 13), top_p=st.sampled_from([1e-6, 0.3, 0.5, 0.75, 0.999, 1.0]))
@pytest.mark.parametrize("short_list", [1, 256])
def test_keep_top_keeps_the_smallest_set(short_list: int, row: list[float], top_k: int, top_p: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "SHORT_LIST", short_list)
        kept = ops.keep_top(torch.tensor([row]), torch.tensor([top_k]), torch.tensor([top_p]))[0]
    candidates = in_order(row)[:top_k]
    weight = torch.tensor([row[i] for i in candidates]).softmax(-1).double()
    num_kept = 1
    while top_p < 1 and num_kept < len(candidates) and weight[:num_kept].sum() < torch.tensor(top_p).double():
        num_kept += 1
    allowed = set(candidates if top_p == 1 else candidates[:num_kept])
    assert kept.tolist() == [value if i in allowed else -math.inf for i, value in enumerate(row)]


def test_rows_with_long_and_short_sets_meet_in_one_call() -> None:
    """A flat row needs more than the short list; its neighbours are cut as they are alone."""
    logits_LV = torch.stack([torch.zeros(1_000), torch.linspace(0, -50, 1_000), torch.zeros(1_000), torch.linspace(0, -1, 1_000)])
    top_k_L, top_p_L = torch.tensor([ops.NO_LIMIT, ops.NO_LIMIT, 600, 3]), torch.tensor([0.5, 0.9, 0.5, 0.99])
    kept_LV = ops.keep_top(logits_LV, top_k_L, top_p_L) > -math.inf
    share_V = logits_LV[1].double().softmax(-1)
    assert kept_LV.sum(-1).tolist() == [500, int((share_V.cumsum(-1) < 0.9).sum()) + 1, 300, 3]
    assert all(row.nonzero()[:, 0].tolist() == list(range(int(row.sum()))) for row in kept_LV)


def test_top_p_of_one_cuts_nothing_however_long_the_tail() -> None:
    logits_LV = torch.linspace(0, -60, 50_000)[None]
    assert torch.equal(ops.keep_top(logits_LV, torch.tensor([ops.NO_LIMIT]), torch.tensor([1.0])), logits_LV)


def penalise_by_hand(row: Tensor, counts: list[int], seen: list[bool], presence: float, frequency: float, repetition: float) -> list[float]:
    out = []
    for logit, count, was_seen in zip(row.tolist(), counts, seen):
        if was_seen:
            logit = logit / repetition if logit > 0 else logit * repetition
        out.append(logit - frequency * count - (presence if count else 0.0))
    return out


def test_penalties_equal_a_plain_loop() -> None:
    logits_LV = torch.tensor([[2.0, -1.0, 0.0, 4.0], [2.0, -1.0, -math.inf, 4.0]])
    counts, seen = [[0, 2, 1, 0], [3, 0, 1, 0]], [[True, True, True, False], [True, False, True, True]]
    presence, frequency, repetition = [0.5, -1.0], [0.25, 2.0], [2.0, 0.5]
    got_LV = ops.penalise(
        logits_LV,
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(seen),
        torch.tensor(presence),
        torch.tensor(frequency),
        torch.tensor(repetition),
    )
    for row in range(2):
        expected = penalise_by_hand(logits_LV[row], counts[row], seen[row], presence[row], frequency[row], repetition[row])
        assert got_LV[row].tolist() == pytest.approx(expected)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=30))
def test_count_tokens_counts_the_valid_ones(entries: list[tuple[int, bool]]) -> None:
    ids_LC = torch.tensor([[i for i, _ in entries]], dtype=torch.int32)
    valid_LC = torch.tensor([[valid for _, valid in entries]])
    expected = [sum(i == token and valid for i, valid in entries) for token in range(5)]
    assert ops.count_tokens(ids_LC, valid_LC, 5).tolist() == [expected]
