# SPDX-License-Identifier: Apache-2.0
"""The free list of physical blocks. Integers only: what a block holds is the model's business, who owns it the manager's.

Block 0 is the null block: padded writes go there, nothing reads it, and it is never handed out. Blocks come back in the order they were
freed and leave in that order too, so a block rests as long as possible before it is overwritten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"a pool needs the null block and at least one more, got {num_blocks}"
        self.num_blocks = num_blocks
        """Physical blocks, the null block included."""
        self._free = deque(range(1, num_blocks))
        self._is_free = bytearray([0] + [1] * (num_blocks - 1))

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out when all are free."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks; the caller has looked at `num_free`."""
        assert 0 <= count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        block_ids = tuple([self._free.popleft() for _ in range(count)])
        for block_id in block_ids:
            self._is_free[block_id] = 0
        return block_ids

    def release(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            assert 0 < block_id < self.num_blocks, f"block {block_id} is not of this pool"
            assert not self._is_free[block_id], f"block {block_id} is freed twice"
            self._is_free[block_id] = 1
            self._free.append(block_id)

    def is_free(self, block_id: int) -> bool:
        return bool(self._is_free[block_id])

    def check(self) -> None:
        """Assert that the list and the flags agree and that the null block never became free."""
        assert len(set(self._free)) == len(self._free), "a block stands twice in the free list"
        assert sum(self._is_free) == len(self._free), "free flags and free list disagree"
        assert all(self._is_free[block_id] for block_id in self._free), "a block in the free list is flagged as used"
        assert not self._is_free[NULL_BLOCK], "the null block became free"
