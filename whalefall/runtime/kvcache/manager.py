# SPDX-License-Identifier: Apache-2.0
"""Who owns which blocks and state slots. Bookkeeping only: no tensors, no time, no requests by name; the scheduler is the caller.

A running request holds one `Reservation`: a state slot and a block table that grows. Given back, it is either free at once or *retires*:
a step that was already launched may still read and write it, so it becomes free when that step is done and not before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from whalefall.core.errors import ConfigError
from whalefall.runtime.kvcache.block_pool import BlockPool


@dataclass(eq=False, slots=True)
class Reservation:
    """A state slot and a block table, held by one running request."""

    slot: int
    block_ids: list[int] = field(default_factory=list)
    """Physical blocks in logical order. Read only outside this file."""
    num_tokens: int = 0
    """Positions below this have a block."""


class CacheManager:
    def __init__(self, num_blocks: int, block_tokens: int, num_slots: int) -> None:
        """num_blocks counts the null block, which is never handed out; slots are 0..num_slots-1."""
        _check_sizes(num_blocks, block_tokens, num_slots)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.num_slots = num_slots
        self._pool = BlockPool(num_blocks)
        self._free_slots = list(range(num_slots - 1, -1, -1))  # a stack with slot 0 on top: low slots stay busy, high ones stay cold
        self._held: set[Reservation] = set()
        self._retiring: deque[tuple[int, Reservation]] = deque()  # by step; steps are launched in order, so a queue is enough
        self._num_retiring_blocks = 0

    @property
    def capacity_tokens(self) -> int:
        """Positions that one request could fill with the whole pool to itself."""
        return self._pool.num_usable * self.block_tokens

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_retiring_blocks(self) -> int:
        """Blocks that become free once the launched steps are done."""
        return self._num_retiring_blocks

    @property
    def is_pristine(self) -> bool:
        """Everything is free, as at the start."""
        return self._pool.num_free == self._pool.num_usable and len(self._free_slots) == self.num_slots

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def reserve(self, num_tokens: int) -> Reservation | None:
        """A slot and blocks for positions [0, num_tokens), or None (and no change) when there are not enough."""
        if not self._free_slots or self.blocks_for(num_tokens) > self._pool.num_free:
            return None
        reservation = Reservation(self._free_slots.pop())
        self._held.add(reservation)
        self.extend(reservation, num_tokens)
        return reservation

    def extend(self, reservation: Reservation, num_tokens: int) -> tuple[int, ...] | None:
        """Append blocks until positions [0, num_tokens) are covered; the new ones, or None (and no change) when there are not enough."""
        assert reservation in self._held, f"slot {reservation.slot}: extended after it was given back"
        count = self.blocks_for(num_tokens) - len(reservation.block_ids)
        if count <= 0:
            return ()
        if count > self._pool.num_free:
            return None
        new_ids = self._pool.allocate(count)
        reservation.block_ids.extend(new_ids)
        reservation.num_tokens = len(reservation.block_ids) * self.block_tokens
        return new_ids

    def release(self, reservation: Reservation, after_step: int | None = None) -> None:
        """Give everything back: at once, or when `after_step` (the newest launched step that names it) is done."""
        assert reservation in self._held, f"slot {reservation.slot}: given back twice"
        self._held.remove(reservation)
        if after_step is None:
            self._free(reservation)
            return
        # At most two steps are launched and not done. An older one can still come after a newer one here: keep the queue sorted.
        at = len(self._retiring)
        while at and self._retiring[at - 1][0] > after_step:
            at -= 1
        self._retiring.insert(at, (after_step, reservation))
        self._num_retiring_blocks += len(reservation.block_ids)

    def step_done(self, step_id: int) -> None:
        """Steps up to `step_id` have run to their end: what retired on them is free now."""
        while self._retiring and self._retiring[0][0] <= step_id:
            _, reservation = self._retiring.popleft()
            self._num_retiring_blocks -= len(reservation.block_ids)
            self._free(reservation)

    def check(self) -> None:
        """Assert that every block and slot has exactly one place: free, held or retiring."""
        self._pool.check()
        reservations = [*self._held, *(reservation for _, reservation in self._retiring)]
        block_ids = [block_id for reservation in reservations for block_id in reservation.block_ids]
        slots = [reservation.slot for reservation in reservations]
        assert len(set(block_ids)) == len(block_ids), "a block has two owners"
        assert not any(self._pool.is_free(block_id) for block_id in block_ids), "a block is owned and free"
        assert len(block_ids) + self._pool.num_free == self._pool.num_usable, "blocks are lost"
        assert sorted([*slots, *self._free_slots]) == list(range(self.num_slots)), "slots are lost or owned twice"
        assert all(r.num_tokens == len(r.block_ids) * self.block_tokens for r in reservations), "a reservation miscounts its tokens"
        assert self._num_retiring_blocks == sum(len(r.block_ids) for _, r in self._retiring), "retiring blocks are miscounted"
        assert [step for step, _ in self._retiring] == sorted(step for step, _ in self._retiring), "retiring queue is out of order"

    def _free(self, reservation: Reservation) -> None:
        self._pool.release(reservation.block_ids)
        self._free_slots.append(reservation.slot)


def _check_sizes(num_blocks: int, block_tokens: int, num_slots: int) -> None:
    problems = []
    if num_blocks < 2:
        problems.append(f"num_blocks is {num_blocks}, at least 2 are needed (block 0 is the null block): give the KV cache more memory")
    if block_tokens < 1:
        problems.append(f"block_tokens is {block_tokens}, must be at least 1")
    if num_slots < 1:
        problems.append(f"num_slots is {num_slots}, must be at least 1")
    if problems:
        raise ConfigError(problems)
