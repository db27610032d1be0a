# SPDX-License-Identifier: Apache-2.0
"""CostEstimate: what computing a token, loading a block and fetching a block take, from what was seen; so that loading is never the slower
way. Smoothed averages; told durations, reads no clock. With nothing seen yet, loading is worth a try.
"""

from __future__ import annotations

MIN_ROWS = 32
"""Steps with fewer rows say little about prompts: their time is overhead."""
WEIGHT = 0.2
"""Of the newest value in an average."""
TRY_AGAIN_AFTER = 32
"""A way that was too slow is tried again after so many refusals: disks and neighbours change."""


class CostEstimate:
    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._compute_s: float | None = None
        """Per block."""
        self._load_s: float | None = None
        self._fetch_s: float | None = None
        self._num_refused = 0

    def compute_s(self, num_blocks: int) -> float | None:
        """Seconds to compute the tokens of so many blocks; None when no prompt has been seen yet."""
        return None if self._compute_s is None else num_blocks * self._compute_s

    def note_step(self, num_rows: int, elapsed_s: float) -> None:
        if num_rows >= MIN_ROWS:
            self._compute_s = _smooth(self._compute_s, elapsed_s / num_rows * self._block_tokens)

    def note_load(self, num_blocks: int, elapsed_s: float) -> None:
        self._load_s = _smooth(self._load_s, elapsed_s / num_blocks)

    def note_fetch(self, num_blocks: int, elapsed_s: float) -> None:
        if num_blocks:
            self._fetch_s = _smooth(self._fetch_s, elapsed_s / num_blocks)

    def is_load_worthwhile(self, num_blocks: int) -> bool:
        return self._is_worthwhile(num_blocks, self._load_s)

    def is_fetch_worthwhile(self, num_blocks: int) -> bool:
        return self._is_worthwhile(num_blocks, None if self._fetch_s is None else self._fetch_s + (self._load_s or 0.0))

    def _is_worthwhile(self, num_blocks: int, move_s: float | None) -> bool:
        if self._compute_s is None or move_s is None or move_s < self._compute_s:
            return True
        self._num_refused += 1
        return self._num_refused % TRY_AGAIN_AFTER == 0


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else (1 - WEIGHT) * old + WEIGHT * new
