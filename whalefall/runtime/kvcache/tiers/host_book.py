# SPDX-License-Identifier: Apache-2.0
"""Which record lies in which row of the host tier. Keys and row numbers only.

A row is *free*, *taken* (its bytes are being filled or read, so it is pinned), or *idle*: findable by its key and the first to go when it
has not been used for longest. Whoever uses a sequence touches its keys from the last to the first, so that its end is given up before its
beginning: what is left of a sequence can still be found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class HostBook:
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_evicted = 0
        self.lost: list[bytes] = []
        """Keys that can no longer be found; the reader empties it."""
        self._free = list(range(num_rows - 1, -1, -1))
        self._row_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._pins = [0] * num_rows
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Rows that could be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def num_listed(self) -> int:
        return len(self._row_of)

    @property
    def keys(self) -> Iterable[bytes]:
        """Of what can be found."""
        return self._row_of.keys()

    def __contains__(self, key: bytes) -> bool:
        return key in self._row_of

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The rows of the longest run of known keys, counted from the first."""
        rows = []
        for key in keys:
            row = self._row_of.get(key)
            if row is None:
                break
            rows.append(row)
        return rows

    def touch(self, keys: Sequence[bytes]) -> None:
        """A sequence (or a run of it) was used just now; unknown keys are passed over."""
        for key in reversed(keys):
            if key in self._idle:
                self._idle.move_to_end(key)

    def take(self, count: int) -> list[int]:
        """Up to `count` pinned rows for new records; what was idle for longest makes room. Fewer when the rest is pinned."""
        rows: list[int] = []
        while len(rows) < count and (self._free or self._idle):
            if not self._free:
                self.forget((next(iter(self._idle)),))
                self.num_evicted += 1
            row = self._free.pop()
            self._pins[row] = 1
            rows.append(row)
        return rows

    def enter(self, key: bytes, row: int) -> bool:
        """A taken row now holds the record of `key`, and stays pinned. When another row holds it already, this one stays unnamed: False."""
        assert self._pins[row] > 0 and row not in self._key_of, f"row {row} is not being filled"
        if key in self._row_of:
            return False
        self._row_of[key] = row
        self._key_of[row] = key
        return True

    def pin(self, rows: Iterable[int]) -> None:
        for row in rows:
            if self._pins[row] == 0:
                self._idle.pop(self._key_of[row])
            self._pins[row] += 1

    def unpin(self, rows: Sequence[int]) -> None:
        """Rows of one sequence, in order."""
        for row in reversed(rows):
            self._pins[row] -= 1
            assert self._pins[row] >= 0, f"row {row} is unpinned twice"
            if self._pins[row] == 0:
                key = self._key_of.get(row)
                if key is None:
                    self._free.append(row)  # never filled, a duplicate, or forgotten by a reset
                else:
                    self._idle[key] = None

    def forget(self, keys: Iterable[bytes]) -> None:
        """Make these unfindable; rows that are pinned become free when they are unpinned."""
        for key in keys:
            row = self._row_of.pop(key, None)
            if row is None:
                continue
            del self._key_of[row]
            self.lost.append(key)
            if self._pins[row] == 0:
                del self._idle[key]
                self._free.append(row)

    def reset(self) -> None:
        """Forget every key; pinned rows become free when they are unpinned."""
        self.forget(list(self._row_of))

    def check(self) -> None:
        """Assert that each row is in one place."""
        assert {row: key for key, row in self._row_of.items()} == self._key_of, "keys and rows disagree"
        assert all(self._pins[self._row_of[key]] == 0 for key in self._idle), "an idle row is pinned"
        pinned = [row for row, pins in enumerate(self._pins) if pins]
        places = sorted([*self._free, *pinned, *(self._row_of[key] for key in self._idle)])
        assert places == list(range(self.num_rows)), "a row is lost, or in two places"
        assert all(row not in self._key_of for row in self._free), "a free row has a key"
