# SPDX-License-Identifier: Apache-2.0
"""The n-gram drafter says what followed last time, by a second account in plain loops."""

from __future__ import annotations

from typing import cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from whalefall.core.batch import CacheTensors, DraftChooser, DraftRequests
from whalefall.runtime.spec.ngram import NgramDrafter

NOTHING = cast(CacheTensors, None)


def draft(texts: list[list[int]], k: int, longest: int = 4, shortest: int = 2) -> list[list[int]]:
    width = max(map(len, texts)) + 3
    # What stands behind a text in the table is left over from others and looks like a tempting continuation.
    table_SP = torch.tensor([[*text, *([text[-1]] * (width - len(text)))] for text in texts], dtype=torch.int32)
    requests = DraftRequests(
        slot_R=torch.arange(len(texts)),
        position_R=torch.tensor([len(text) - 1 for text in texts]),
        latest_id_R=torch.tensor([text[-1] for text in texts]),
        token_ids_SP=table_SP,
        max_position=width - 2,
        choose=cast(DraftChooser, None),
    )
    drafts = NgramDrafter(max_draft_tokens=k, longest=longest, shortest=shortest).draft(requests, NOTHING, k)
    assert drafts.probs_RKV is None
    return drafts.ids_RK.tolist()


def by_hand(text: list[int], k: int, longest: int, shortest: int) -> list[int]:
    best = (0, -1)
    for end in range(len(text) - 1):
        length = 0
        while length < longest and length <= end and text[end - length] == text[len(text) - 1 - length]:
            length += 1
        best = max(best, (length, end))
    if best[0] < shortest:
        return [-1] * k
    whole = list(text)
    for i in range(k):
        whole.append(whole[best[1] + 1 + i])
    return whole[len(text) :]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=5),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_it_repeats_what_followed_the_longest_and_latest_match(texts: list[list[int]], k: int, longest: int, shortest: int) -> None:
    shortest = min(shortest, longest)
    assert draft(texts, k, longest, shortest) == [by_hand(text, k, longest, shortest) for text in texts]


def test_a_period_goes_on() -> None:
    assert draft([[1, 2, 1, 2, 1, 2]], 5) == [[1, 2, 1, 2, 1]]


def test_without_repetition_there_is_no_draft() -> None:
    assert draft([[1, 2, 3, 4], [7]], 3) == [[-1, -1, -1]] * 2
