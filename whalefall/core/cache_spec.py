# SPDX-License-Identifier: Apache-2.0
"""CacheSpec: what a model keeps per token, per window and per request. Declared by the model, allocated by the runtime.

Three kinds of memory, and no other:

* *growing* fields live in blocks. One block holds `block_tokens` tokens of every growing field, so one block table, one hash and one
  eviction order serve them all. Physical block 0 is the null block: writes of padding and of replayed rows go there, and what a masked
  read finds there never counts.
* *rings* live in the request's state slot and hold the last rows of a window. Row of position p is `p % rows`; every ring group
  carries a tag tensor with the absolute position stored in each row, and a read checks the tag.
* *states* live in the state slot too: anything else of fixed size.

dtypes are names ("float32", "bfloat16", "uint8") so that the scheduler can read a spec without importing torch.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1, "int32": 4, "int64": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowingField:
    """One tensor [num_blocks * entries_per_block, width] that grows with the sequence."""

    name: str
    """Unique, e.g. "layers.2.main"."""
    width: int
    """Elements per entry."""
    dtype: str
    tokens_per_entry: int
    """Compression ratio: one entry for this many tokens; divides block_tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingField:
    """One tensor [num_slots, rows, width] holding the newest rows of a window."""

    name: str
    width: int
    dtype: str
    rows: int
    """At least the window; more to allow rollback. The same for all fields of a group."""
    group: str
    """Fields written by the same rows share a group and one tag tensor [num_slots, rows]."""
    num_spare_rows: int = 0
    """How many of the rows are there for drafts that may be refused; the window needs the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateField:
    """One tensor [num_slots, *shape] of fixed size per request."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSpec:
    block_tokens: int = 256
    growing: tuple[GrowingField, ...] = ()
    rings: tuple[RingField, ...] = ()
    states: tuple[StateField, ...] = ()

    def __post_init__(self) -> None:
        names = [f.name for f in self.growing] + [f.name for f in self.rings] + [f.name for f in self.states]
        assert len(set(names)) == len(names), f"cache field names repeat: {sorted(names)}"
        for f in self.growing:
            assert self.block_tokens % f.tokens_per_entry == 0, f"{f.name}: {f.tokens_per_entry} does not divide {self.block_tokens}"
        for group in self.ring_groups:
            assert len({f.rows for f in self.rings if f.group == group}) == 1, f"ring group {group} mixes row counts"

    @property
    def ring_groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f.group for f in self.rings))

    def ring_rows(self, group: str) -> int:
        return next(f.rows for f in self.rings if f.group == group)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all growing fields."""
        return sum(self.block_tokens // f.tokens_per_entry * f.width * DTYPE_BYTES[f.dtype] for f in self.growing)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one request's fixed state: rings with their int32 tags, and states."""
        rings = sum(f.rows * f.width * DTYPE_BYTES[f.dtype] for f in self.rings)
        tags = sum(self.ring_rows(g) * 4 for g in self.ring_groups)
        states = sum(_product(f.shape) * DTYPE_BYTES[f.dtype] for f in self.states)
        return rings + tags + states

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a copy of one request's fixed state. Tags need none: the position of the copy gives them."""
        return self.slot_bytes - sum(self.ring_rows(g) * 4 for g in self.ring_groups)

    @property
    def replay_rows(self) -> int:
        """Rows that must run before a position so that every window is whole: the longest one's."""
        return max((f.rows - f.num_spare_rows for f in self.rings), default=0)


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
