# SPDX-License-Identifier: Apache-2.0
"""RingStep against a dictionary: whatever the chunks and the company, a query finds exactly the rows of its window."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from whalefall.core.batch import RowSet
from whalefall.layers.window import RingStep

SLOTS = 4
Part = tuple[int, int, int]
"""(start, number of rows, window floor) of one request in a step."""


def row_set(parts: list[Part]) -> RowSet:
    start_B, num_B, floor_B = (torch.tensor(column) for column in zip(*parts))
    first_row_B = num_B.cumsum(0) - num_B
    request_T = torch.repeat_interleave(torch.arange(len(parts)), num_B)
    return RowSet(
        positions_T=torch.arange(int(num_B.sum())) - first_row_B[request_T] + start_B[request_T],
        request_T=request_T,
        first_row_B=first_row_B,
        start_B=start_B,
        window_start_B=floor_B,
        num_rows=int(num_B.sum()),
        max_rows=int(num_B.max()),
    )


@dataclass
class World:
    """Rings of one group, and beside them what each slot's request has written, by position."""

    window: int
    ring_rows: int
    written: list[dict[int, float]] = field(default_factory=lambda: [{} for _ in range(SLOTS)])
    floor: list[int] = field(default_factory=lambda: [0] * SLOTS)
    next_position: list[int] = field(default_factory=lambda: [0] * SLOTS)
    next_value: float = 1.0

    def __post_init__(self) -> None:
        self.tags_SR = torch.full((SLOTS, self.ring_rows), -1, dtype=torch.int32)
        self.rings = [torch.full((SLOTS, self.ring_rows, 2), torch.nan) for _ in range(2)]
        """Two layers of one group."""

    def restart(self, slot: int, floor: int) -> None:
        """A new request takes the slot; it starts at its window floor."""
        self.tags_SR[slot] = -1
        self.written[slot], self.floor[slot], self.next_position[slot] = {}, floor, floor

    def step(self, chunks: list[tuple[int, int, int]]) -> tuple[RingStep, list[list[float]], list[list[float]]]:
        """Write chunks of (slot, rows, how many of the last rows look); the step, and found and expected windows of every query."""
        slots = [slot for slot, _, _ in chunks]
        writers = row_set([(self.next_position[s], rows, self.floor[s]) for s, rows, _ in chunks])
        queries = row_set([(self.next_position[s] + rows - look, look, self.floor[s]) for s, rows, look in chunks])
        max_context = max(self.next_position[s] + rows for s, rows, _ in chunks)
        ring_step = RingStep(writers, torch.tensor(slots), self.tags_SR, self.window)
        new_T = []
        for slot, rows, _ in chunks:
            for _ in range(rows):
                self.written[slot][self.next_position[slot]] = self.next_value
                new_T.append(self.next_value)
                self.next_position[slot] += 1
                self.next_value += 1
        index_TW = ring_step.index(queries, queries.window_start_B, max_context)
        found = self.read(ring_step, torch.tensor(new_T), index_TW)
        expected = []
        for request, position in zip(queries.request_T.tolist(), queries.positions_T.tolist()):
            seen = range(max(self.floor[slots[request]], position - self.window + 1), position + 1)
            expected.append([self.written[slots[request]][p] for p in seen])
        return ring_step, found, expected

    def read(self, ring_step: RingStep, new_T: Tensor, index_TW: Tensor) -> list[list[float]]:
        """What the queries find, the same in both layers, oldest first, without absent rows."""
        found = []
        for sign, ring in zip((1, -1), self.rings):
            source_MD = ring_step.source(ring, sign * new_T[:, None].expand(-1, 2))
            found.append([(sign * source_MD[row[row >= 0], 1]).tolist() for row in index_TW])
        assert found[0] == found[1]
        return found[0]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), window=st.integers(1, 6), spare=st.integers(-1, 4))
def test_queries_find_the_rows_of_their_window(data: st.DataObject, window: int, spare: int) -> None:
    world = World(window, max(1, window + spare))
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.integers(0, 5)) == 0:
            world.restart(data.draw(st.integers(0, SLOTS - 1)), data.draw(st.integers(0, 9)))
        slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, unique=True))
        most = data.draw(st.sampled_from([1, max(1, spare), 3 * world.ring_rows]))  # decode, a few, anything
        chunks = []
        for slot in slots:
            rows = data.draw(st.integers(1, most))
            chunks.append((slot, rows, data.draw(st.integers(0, rows))))
        ring_step, found, expected = world.step(chunks)
        assert found == expected
        assert ring_step.num_mismatches == 0
        assert ring_step.is_direct == (max(rows for _, rows, _ in chunks) <= world.ring_rows - window + 1)


@pytest.mark.parametrize(("rows", "is_direct"), [(1, True), (3, False)])
def test_a_row_with_a_wrong_tag_is_absent_and_counted(rows: int, is_direct: bool) -> None:
    world = World(window=4, ring_rows=4)
    world.step([(0, 5, 5), (2, 6, 6)])
    world.tags_SR[2, 5 % 4] = 1  # slot 2 should hold position 5 there
    ring_step, found, expected = world.step([(0, rows, rows), (2, rows, rows)])
    assert ring_step.is_direct == is_direct
    lost = world.written[2][5]
    assert found == [[value for value in row if value != lost] for row in expected]
    assert ring_step.num_mismatches == sum(lost in row for row in expected) == rows


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_reused_slot_shows_nothing_of_the_former_request(rows: int) -> None:
    world = World(window=4, ring_rows=4)
    world.step([(1, 9, 9)])
    world.restart(1, floor=0)
    _, found, expected = world.step([(1, rows, rows)])
    assert found == expected
    assert [len(row) for row in found] == [min(4, i + 1) for i in range(rows)]


def test_without_the_reset_the_former_request_would_be_seen() -> None:
    """The tags alone cannot tell two requests apart: the reset is part of the contract."""
    world = World(window=2, ring_rows=2)
    world.step([(1, 3, 3)])
    former = dict(world.written[1])
    world.written[1], world.next_position[1] = {}, 3
    writers = row_set([(3, 1, 2)])
    ring_step = RingStep(writers, torch.tensor([1]), world.tags_SR, 2)
    index_TW = ring_step.index(writers, writers.window_start_B, 4)
    assert world.read(ring_step, torch.tensor([50.0]), index_TW) == [[former[2], 50.0]]


def test_a_ring_too_small_for_the_window_is_refused() -> None:
    with pytest.raises(AssertionError, match="ring of 2 rows cannot serve a window of 4"):
        RingStep(row_set([(0, 1, 0)]), torch.tensor([0]), torch.full((1, 2), -1, dtype=torch.int32), 4)
