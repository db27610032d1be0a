# SPDX-License-Identifier: Apache-2.0
"""Block pool and cache manager: after any sequence of calls every block and slot has exactly one place."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule

from whalefall.core.errors import ConfigError
from whalefall.runtime.kvcache.block_pool import NULL_BLOCK, BlockPool
from whalefall.runtime.kvcache.manager import CacheManager, Reservation


class PoolLife(RuleBasedStateMachine):
    """Any sequence of allocations and releases, against a set of ids."""

    taken: Bundle[int] = Bundle("taken")

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.held: set[int] = set()

    @rule(target=taken, share=st.floats(0, 1))
    def allocate(self, share: float) -> object:
        new_ids = self.pool.allocate(int(share * self.pool.num_free))
        assert self.held.isdisjoint(new_ids) and NULL_BLOCK not in new_ids
        assert all(0 < block_id < self.num_blocks for block_id in new_ids)
        self.held.update(new_ids)
        return multiple(*new_ids)

    @rule(block_id=consumes(taken))
    def release(self, block_id: int) -> None:
        self.pool.release([block_id])
        self.held.remove(block_id)

    @invariant()
    def is_sound(self) -> None:
        self.pool.check()
        assert self.pool.num_free == self.num_blocks - 1 - len(self.held)
        assert all(self.pool.is_free(block_id) == (block_id not in self.held) for block_id in range(1, self.num_blocks))


class ManagerLife(RuleBasedStateMachine):
    """Any sequence of calls, against a model that only knows sizes: what is held, and what retires on which step."""

    held: Bundle[Reservation] = Bundle("held")

    @initialize(num_blocks=st.integers(2, 20), block_tokens=st.integers(1, 5), num_slots=st.integers(1, 6))
    def start(self, num_blocks: int, block_tokens: int, num_slots: int) -> None:
        self.manager = CacheManager(num_blocks, block_tokens, num_slots)
        self.live: dict[Reservation, list[int]] = {}
        self.retiring: list[tuple[int, list[int]]] = []
        self.done_step = -1

    def free_blocks(self) -> int:
        busy = [*self.live.values(), *(ids for _, ids in self.retiring)]
        return self.manager.num_blocks - 1 - sum(len(ids) for ids in busy)

    def free_slots(self) -> int:
        return self.manager.num_slots - len(self.live) - len(self.retiring)

    @rule(target=held, num_tokens=st.integers(0, 40))
    def reserve(self, num_tokens: int) -> object:
        count = -(-num_tokens // self.manager.block_tokens)
        should_fit = self.free_slots() > 0 and count <= self.free_blocks()
        reservation = self.manager.reserve(num_tokens)
        assert (reservation is not None) == should_fit
        if reservation is None:
            return multiple()
        assert len(reservation.block_ids) == count and reservation.num_tokens >= num_tokens
        assert reservation.slot not in [other.slot for other in self.live]
        self.live[reservation] = list(reservation.block_ids)
        return reservation

    @rule(reservation=held, num_tokens=st.integers(0, 60))
    @precondition(lambda self: self.live)
    def extend(self, reservation: Reservation, num_tokens: int) -> None:
        if reservation not in self.live:
            return
        count = max(0, -(-num_tokens // self.manager.block_tokens) - len(reservation.block_ids))
        should_fit = count <= self.free_blocks()
        new_ids = self.manager.extend(reservation, num_tokens)
        assert (new_ids is not None) == should_fit
        if new_ids is not None:
            assert len(new_ids) == count
            self.live[reservation] += new_ids
        assert reservation.block_ids == self.live[reservation]

    @rule(reservation=consumes(held), ahead=st.one_of(st.none(), st.integers(1, 2)))
    def release(self, reservation: Reservation, ahead: int | None) -> None:
        ids = self.live.pop(reservation)
        after_step = None if ahead is None else self.done_step + ahead
        self.manager.release(reservation, after_step)
        if after_step is not None:
            self.retiring.append((after_step, ids))

    @rule(count=st.integers(1, 2))
    def finish_steps(self, count: int) -> None:
        self.done_step += count
        self.manager.step_done(self.done_step)
        self.retiring = [(step, ids) for step, ids in self.retiring if step > self.done_step]

    @invariant()
    def is_sound(self) -> None:
        self.manager.check()
        assert self.manager.num_free_blocks == self.free_blocks()
        assert self.manager.num_free_slots == self.free_slots()
        assert self.manager.num_retiring_blocks == sum(len(ids) for _, ids in self.retiring)
        assert self.manager.is_pristine == (not self.live and not self.retiring)

    def teardown(self) -> None:
        for reservation in list(self.live):
            self.manager.release(reservation)
        self.manager.step_done(self.done_step + 2)
        assert self.manager.is_pristine


TestPoolLife = PoolLife.TestCase
TestManagerLife = ManagerLife.TestCase
TestPoolLife.settings = TestManagerLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def test_blocks_leave_in_the_order_they_came_back() -> None:
    pool = BlockPool(5)
    pool.allocate(4)
    pool.release([3])
    pool.release([1, 4])

    assert pool.allocate(3) == (3, 1, 4)


def test_block_freed_twice_is_a_slip() -> None:
    pool = BlockPool(3)
    (block_id,) = pool.allocate(1)
    pool.release([block_id])

    with pytest.raises(AssertionError, match="freed twice"):
        pool.release([block_id])


def test_null_block_cannot_be_released() -> None:
    with pytest.raises(AssertionError, match="not of this pool"):
        BlockPool(3).release([NULL_BLOCK])


def test_reservation_given_back_twice_is_a_slip() -> None:
    manager = CacheManager(4, 2, 2)
    reservation = manager.reserve(2)
    manager.release(reservation, after_step=0)

    with pytest.raises(AssertionError, match="given back twice"):
        manager.release(reservation)
    with pytest.raises(AssertionError, match="after it was given back"):
        manager.extend(reservation, 4)


def test_refused_reservation_changes_nothing() -> None:
    manager = CacheManager(4, 2, 1)

    assert manager.reserve(7) is None
    assert manager.is_pristine


def test_retired_blocks_are_free_when_their_step_is_done_and_not_before() -> None:
    manager = CacheManager(4, 2, 2)
    manager.release(manager.reserve(6), after_step=5)
    manager.step_done(4)
    free_before = manager.num_free_blocks
    manager.step_done(5)

    assert (free_before, manager.num_free_blocks) == (0, 3)


def test_retirements_out_of_order_come_free_in_order() -> None:
    manager = CacheManager(7, 1, 3)
    late, early = manager.reserve(4), manager.reserve(2)
    manager.release(late, after_step=2)
    manager.release(early, after_step=1)
    manager.step_done(1)

    assert (manager.num_free_blocks, manager.num_retiring_blocks) == (2, 4)


def test_sizes_that_cannot_work_are_all_named() -> None:
    with pytest.raises(ConfigError) as refusal:
        CacheManager(1, 0, 0)
    assert [problem.split()[0] for problem in refusal.value.problems] == ["num_blocks", "block_tokens", "num_slots"]
