# SPDX-License-Identifier: Apache-2.0
"""StopMatcher: the earliest match, whatever the pieces; nothing of a stop string leaks, nothing else is lost."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalefall.text.stop import StopMatcher


def shown(pieces: Iterable[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_in_text=include)
    text = ""
    for piece in pieces:
        text += matcher.push(piece)
        if matcher.matched is not None:
            return text, matcher.matched
    return text + matcher.flush(), None


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read letter by letter; the first letter that completes a stop string ends the text before the longest one ending there."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.lists(LETTERS, max_size=5), STOPS)
def test_result_equals_a_letter_by_letter_search_for_any_pieces(pieces: list[str], stops: list[str]) -> None:
    assert shown(pieces, stops) == oracle("".join(pieces), stops)


@given(st.lists(LETTERS, max_size=5), STOPS)
def test_shown_text_is_never_taken_back_and_only_a_possible_beginning_waits(pieces: list[str], stops: list[str]) -> None:
    final, _ = oracle("".join(pieces), stops)
    matcher = StopMatcher(stops, include_in_text=False)
    text = fed = ""
    for piece in pieces:
        text += matcher.push(piece)
        fed += piece
        assert final.startswith(text)
        if matcher.matched is not None:
            return
        assert any(stop.startswith(fed[len(text) :]) for stop in stops)


@given(st.lists(LETTERS, max_size=5), STOPS)
def test_included_stop_string_ends_the_text(pieces: list[str], stops: list[str]) -> None:
    text, stop = oracle("".join(pieces), stops)
    assert shown(pieces, stops, include=True) == (text + (stop or ""), stop)


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        (["hello wo", "rld EN", "D more"], ["END"], "hello world ", "END"),
        (["hello EN"], ["END"], "hello EN", None),
        (["hello EN", "D"], ["EN", "END"], "hello ", "EN"),
        (["hello EN", "D"], ["END", "EN"], "hello ", "EN"),
        (["x</s", "top>y"], ["</stop>"], "x", "</stop>"),
        (["aé", "🐋b"], ["é🐋"], "a", "é🐋"),
    ],
)
def test_reported_cases(pieces: list[str], stops: list[str], text: str, stop: str | None) -> None:
    assert shown(pieces, stops) == (text, stop)
