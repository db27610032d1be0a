# SPDX-License-Identifier: Apache-2.0
"""Selection: ties, visibility, candidates with real exclusion, and the same lists by every way through the code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.naive import NAIVE, best
from whalefall.kernels import indexer
from whalefall.kernels.indexer import cases, reference
from whalefall.kernels.indexer.reference import top_entries

few_scores = st.sampled_from([-float("inf"), -2.0, -0.0, 0.0, 1.0, 3.0])


@settings(deadline=None)
@given(row=st.lists(few_scores, min_size=1, max_size=12), k=st.integers(1, 14), data=st.data())
def test_top_entries_takes_the_lower_id_of_a_tie_and_never_minus_infinity(row: list[float], k: int, data: st.DataObject) -> None:
    visible = data.draw(st.integers(0, len(row)))
    found = top_entries(torch.tensor([row]), torch.tensor([visible]), k)
    expected = best(row, [j for j in range(visible) if row[j] > -float("inf")], k)
    width = min(k, len(row))
    assert found.tolist() == [expected + [-1] * (width - len(expected))]


def test_what_lies_beyond_the_visible_entries_does_not_matter() -> None:
    scores_TC = torch.tensor([[1.0, 2.0, 3.0, torch.nan], [1.0, torch.inf, torch.nan, torch.nan], [torch.nan] * 4])
    assert top_entries(scores_TC, torch.tensor([3, 1, 0]), 2).tolist() == [[1, 2], [0, -1], [-1, -1]]


def test_equal_scores_give_the_first_entries() -> None:
    assert top_entries(torch.zeros(1, 100), torch.tensor([100]), 7).tolist() == [list(range(7))]


def one_request(num_entries: int, heads: int = 2, width: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, w, keys and a table for one row over many entries in order."""
    return torch.ones(1, heads, width), torch.ones(1, heads), torch.zeros(num_entries, width), torch.arange(num_entries // 4)[None]


def test_a_negative_weight_turns_the_order_and_relu_comes_before_it() -> None:
    q_TIJ, w_TI, keys_RJ, table_BP = one_request(8)
    keys_RJ[:, 0] = torch.tensor([3.0, -5, 1, 2, -1, 4, 0, -9])
    w_TI[:] = torch.tensor([-1.0, 0])
    lists = indexer.select(q_TIJ, w_TI, keys_RJ, table_BP, 4, torch.tensor([0]), torch.tensor([8]), 8, 3)
    assert lists.tolist() == [[1, 4, 6]]  # -relu is 0 for all that is not positive: a tie


def test_the_candidate_source_searches_everything_and_later_layers_do_not() -> None:
    q_TIJ, w_TI, keys_RJ, table_BP = one_request(16)
    # Blocks of 4 by their best entry: 3, 1, 2, and the last one, kept although it is the worst.
    keys_RJ[:, 0] = torch.tensor([3.0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0.5, 0])
    search = q_TIJ, w_TI, keys_RJ, table_BP, 4, torch.tensor([0]), torch.tensor([15]), 15
    lists, candidates = indexer.select_with_candidates(*search, 6, 3, 4)
    assert candidates.tolist() == [[0, 2, 3]]
    assert lists.tolist() == [[0, 4, 8, 9, 10, 11]]  # entry 4 is no candidate, the source may still choose it
    assert indexer.select_within(*search, 6, candidates, 4).tolist() == [[0, 8, 9, 10, 11, 14]]


def test_a_row_with_fewer_entries_than_asked_is_padded() -> None:
    q_TIJ, w_TI, keys_RJ, table_BP = one_request(16)
    search = q_TIJ, w_TI, keys_RJ, table_BP, 4, torch.tensor([0]), torch.tensor([2]), 15
    lists, candidates = indexer.select_with_candidates(*search, 6, 2, 4)
    assert lists.tolist() == [[0, 1, -1, -1, -1, -1]]
    assert candidates.tolist() == [[0, -1]]
    assert indexer.select_within(*search, 6, candidates, 4).tolist() == [[0, 1, -1, -1, -1, -1]]


@pytest.mark.parametrize("name", ["select", "select_with_candidates", "select_within"])
def test_tiles_do_not_change_a_list(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = {"select": cases.selections, "select_with_candidates": cases.with_candidates, "select_within": cases.within}[name]
    for args in list(make())[:12:2]:
        expected = NAIVE[f"indexer.{name}"](*args)
        for tile_scores in (1, 50, 300):
            monkeypatch.setattr(reference, "_TILE_SCORES", tile_scores)
            found = getattr(indexer, name)(*args)
            for a, b in zip(found if isinstance(found, tuple) else (found,), expected if isinstance(expected, tuple) else (expected,)):
                assert torch.equal(a, b)


@pytest.mark.parametrize("k", [3, 8])
def test_rows_of_one_request_find_the_same_alone_and_in_a_crowd(k: int) -> None:
    """Decode batches single rows, a chunk shares one product: both must choose the same entries, also among ties."""
    q_TIJ, w_TI, keys_RJ, table_BP, per_block, request_T, visible_T, max_visible = cases._search(
        ((7, 23), (5, 40), (39, 40)), 1, torch.float32
    )
    together = indexer.select(q_TIJ, w_TI, keys_RJ, table_BP, per_block, request_T, visible_T, max_visible, k)
    for t in range(q_TIJ.shape[0]):
        row = slice(t, t + 1)
        own_max = int(visible_T[t])
        alone = indexer.select(q_TIJ[row], w_TI[row], keys_RJ, table_BP, per_block, request_T[row], visible_T[row], own_max, k)
        assert [j for j in alone[0].tolist() if j >= 0] == [j for j in together[t].tolist() if j >= 0]
