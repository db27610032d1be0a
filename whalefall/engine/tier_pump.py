# SPDX-License-Identifier: Apache-2.0
"""Between the step loop and the tiers below the device's blocks: moves go down after each plan and commit, reports come up before each
plan. Nothing here waits for a copy or a disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from whalefall.observe.metrics import TierStats
from whalefall.runtime.scheduler.scheduler import Scheduler

if TYPE_CHECKING:  # naming the mover must not cost the seconds that importing torch takes
    from whalefall.runtime.kvcache.tiers.mover import Mover

DRAIN_S = 5.0
"""A shutdown waits so long for records on their way to the disk."""
RECHECK_S = 0.05
"""An idle loop that waits for a report looks at the deadlines this often, in case none comes."""


class TierPump:
    """Between scheduler and mover; does nothing when there is no mover."""

    def __init__(self, scheduler: Scheduler, mover: Mover | None, wake: Callable[[], None]) -> None:
        """wake: called from another thread when there is a report to take in."""
        assert (scheduler.tiers is None) == (mover is None), "account and mover come together"
        self._scheduler = scheduler
        self._mover = mover
        if mover is not None:
            mover.wake = wake

    def take_reports(self) -> None:
        if self._mover is not None:
            for report in self._mover.take_reports():
                self._scheduler.moved(report)

    def submit_moves(self) -> None:
        if self._mover is not None:
            self._mover.submit(self._scheduler.take_moves())

    def max_wait_s(self, now_s: float) -> float:
        """How long the loop may sleep while requests wait for moves and nothing else can be done."""
        deadline_s = self._scheduler.next_deadline_s
        return RECHECK_S if deadline_s is None else max(0.0, min(RECHECK_S, deadline_s - now_s))

    def close(self, *, drain: bool) -> None:
        if self._mover is not None:
            self._mover.close(DRAIN_S if drain else 0.0)

    def stats(self) -> TierStats | None:
        mover, ledger = self._mover, self._scheduler.tiers
        if mover is None or ledger is None:
            return None
        done, moved, store = ledger.counters, mover.counts, mover.store
        return TierStats(
            host_blocks_used=ledger.book.num_listed,
            host_blocks_total=ledger.book.num_rows,
            host_queries=done.host_queries,
            host_hits=done.host_hits,
            host_stored_bytes=moved.stored_bytes,
            host_loaded_bytes=moved.loaded_bytes,
            host_failures=moved.num_copy_failures,
            host_evictions=ledger.book.num_evicted,
            has_disk=store is not None,
            disk_blocks_used=0 if store is None else store.counts.used_bytes // mover.record_bytes,
            disk_blocks_total=0 if store is None else store.max_bytes // mover.record_bytes,
            disk_queries=done.disk_queries,
            disk_hits=done.disk_hits,
            disk_written_bytes=moved.written_bytes,
            disk_read_bytes=moved.fetched_bytes,
            disk_failures=moved.num_read_failures + moved.num_write_failures + (0 if store is None else store.counts.num_damaged),
            disk_evictions=0 if store is None else store.counts.num_evicted,
            is_disk_off=store is not None and not (mover.is_writable and mover.is_readable),
            skipped_blocks=done.skipped_stores + done.skipped_writes,
            num_timeouts=done.num_timeouts,
        )
