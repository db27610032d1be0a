# SPDX-License-Identifier: Apache-2.0
"""The host tier's rows: each in one place, pinned ones stay, the least recently used sequence loses its end first."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from whalefall.runtime.kvcache.tiers.host_book import HostBook


def keys_of(*numbers: int) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in numbers]


def fill(book: HostBook, keys: list[bytes]) -> None:
    rows = book.take(len(keys))
    assert len(rows) == len(keys)
    for key, row in zip(keys, rows, strict=True):
        book.enter(key, row)
    book.unpin(rows)


def test_a_sequence_loses_its_end_first_and_the_longest_unused_goes_before_others() -> None:
    book = HostBook(6)
    old, new = keys_of(1, 2, 3), keys_of(11, 12, 13)
    fill(book, old)
    fill(book, new)
    fill(book, keys_of(21))
    assert len(book.match(old)) == 2 and len(book.match(new)) == 3
    book.touch(old)
    fill(book, keys_of(22))
    assert len(book.match(old)) == 2 and len(book.match(new)) == 2


def test_pinned_rows_are_not_given_away() -> None:
    book = HostBook(3)
    fill(book, keys_of(1, 2, 3))
    rows = book.match(keys_of(1, 2))
    book.pin(rows)
    assert len(book.take(5)) == 1 and len(book.match(keys_of(1, 2))) == 2


def test_a_forgotten_pinned_row_becomes_free_when_it_is_unpinned() -> None:
    book = HostBook(2)
    fill(book, keys_of(1, 2))
    rows = book.match(keys_of(1))
    book.pin(rows)
    book.reset()
    assert book.num_listed == 0 and book.num_available == 1
    book.unpin(rows)
    book.check()
    assert book.num_available == 2


class Life(RuleBasedStateMachine):
    """Any order of calls; a dictionary says what each pinned row was for."""

    def __init__(self) -> None:
        super().__init__()
        self.book = HostBook(5)
        self.pinned: list[list[int]] = []
        self.filling: list[list[int]] = []

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        available = self.book.num_available
        rows = self.book.take(count)
        assert len(rows) == min(count, available)
        self.filling.append(rows)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), is_whole=st.booleans())
    def end_filling(self, data: st.DataObject, is_whole: bool) -> None:
        rows = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        for row in rows:
            if is_whole:
                self.book.enter(data.draw(st.sampled_from(keys_of(*range(8)))), row)
        self.book.unpin(rows)

    @rule(keys=st.lists(st.sampled_from(keys_of(*range(8))), unique=True))
    def pin(self, keys: list[bytes]) -> None:
        rows = self.book.match(keys)
        self.book.pin(rows)
        self.pinned.append(rows)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.book.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @rule(keys=st.lists(st.sampled_from(keys_of(*range(8)))))
    def touch(self, keys: list[bytes]) -> None:
        self.book.touch(keys)

    @rule(keys=st.lists(st.sampled_from(keys_of(*range(8)))))
    def forget(self, keys: list[bytes]) -> None:
        self.book.forget(keys)
        assert all(key not in self.book for key in keys)

    @rule()
    def reset(self) -> None:
        self.book.reset()
        assert self.book.num_listed == 0

    @invariant()
    def rows_are_in_one_place(self) -> None:
        self.book.check()
        in_use = {row for rows in (*self.pinned, *self.filling) for row in rows}
        assert self.book.num_available == 5 - len(in_use)


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLife = Life.TestCase
