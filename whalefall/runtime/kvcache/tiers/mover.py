# SPDX-License-Identifier: Apache-2.0
"""Mover: carries out moves in background threads, so that no step waits for a copy or a disk.

    submit(moves)   never blocks; called by the step loop's thread            copy lane    Load before Store    device <-> host
    take_reports()  what has ended since; called by the same thread           read lane    Probe, Fetch         disk -> host
    close()         finish what is begun, drop the rest                       write lane   Write, Remove        host -> disk, rate-capped

Every move is reported exactly once. Whatever goes wrong in a lane costs hits, never a request: it is counted, logged and reported as
"nothing done". The ledger bounds what is under way, so the queues are short by construction; a full one refuses.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from whalefall.observe.log import get_logger
from whalefall.runtime.kvcache.tiers.moves import Fetch, Load, Move, MoveReport, Probe, Remove, Store, Write
from whalefall.runtime.kvcache.tiers.record import BlockCopier, HostSlab
from whalefall.runtime.kvcache.tiers.store import BlockStore

log = get_logger(__name__)
MAX_QUEUED = 4_096
"""Moves in one lane."""
MAX_READ_FAULTS = 8
"""Reads that failed in a row after which the store is left alone: a dead mount can take seconds to say so each time."""


@dataclass(slots=True)
class MoverCounts:
    """Written by one lane each, read by anybody."""

    stored_bytes: int = 0
    loaded_bytes: int = 0
    fetched_bytes: int = 0
    written_bytes: int = 0
    num_copy_failures: int = 0
    num_read_failures: int = 0
    num_write_failures: int = 0


class Mover:
    def __init__(
        self,
        copier: BlockCopier,
        slab: HostSlab,
        store: BlockStore | None,
        *,
        write_bytes_per_s: int | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            write_bytes_per_s: cap on what goes to the store; None for none.
            wake: called from a lane's thread after each report, for a loop that sleeps.
        """
        self.counts = MoverCounts()
        self.store = store
        self.is_writable = self.is_readable = store is not None
        self.wake = wake
        self._copier = copier
        self._slab = slab
        self._rate = RateCap(write_bytes_per_s)
        self._num_read_faults = 0
        self._reports: deque[MoveReport] = deque()
        self._closing = threading.Event()
        self._copy_lane = _Lane("copy", self._copy, self._end)
        self._lanes = [self._copy_lane]
        if store is not None:
            self._read_lane = _Lane("read", self._read, self._end)
            self._write_lane = _Lane("write", self._write, self._end, first=self._look)
            self._lanes += [self._read_lane, self._write_lane]

    @property
    def record_bytes(self) -> int:
        return self._slab.layout.record_bytes

    def submit(self, moves: Iterable[Move]) -> None:
        for move in moves:
            if isinstance(move, Load):
                self._copy_lane.put(0, move)
            elif isinstance(move, Store):
                self._copy_lane.put(1, move)
            elif isinstance(move, Write | Remove):
                self._write_lane.put(0, move)  # one lane, one order: a removal comes after the writes before it
            else:
                self._read_lane.put(0, move)

    def take_reports(self) -> list[MoveReport]:
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def close(self, drain_s: float = 0.0) -> None:
        """Give what is queued so much time, wait for the moves that have begun, and report the rest as not done. More calls do nothing."""
        if self._closing.is_set():
            return
        until_s = time.monotonic() + drain_s
        for lane in self._lanes:  # in the order in which records go down
            lane.drain(until_s)
        self._closing.set()
        for lane in self._lanes:
            lane.close()

    def _end(self, move: Move, num_done: int, elapsed_s: float) -> None:
        """From a lane's thread: report, and see to what follows."""
        if isinstance(move, Store) and move.then is not None:
            if num_done == len(move.keys):
                self._write_lane.put(0, move.then)
            else:
                self._end(move.then, 0, 0.0)
        self._reports.append(MoveReport(move.move_id, num_done, elapsed_s))
        self.wake()

    def _copy(self, move: Move) -> int:
        try:
            if isinstance(move, Load):
                self._copier.load(move.rows, move.block_ids)
                self.counts.loaded_bytes += len(move.keys) * self.record_bytes
            else:
                assert isinstance(move, Store)
                self._copier.store(move.block_ids, move.rows)
                self.counts.stored_bytes += len(move.keys) * self.record_bytes
        except Exception:
            self.counts.num_copy_failures += 1
            raise
        return len(move.keys)

    def _read(self, move: Move) -> int:
        assert self.store is not None
        if not self.is_readable:
            return 0
        try:
            num_done = self._probe(move) if isinstance(move, Probe) else self._fetch(move)
        except Exception as error:
            self.counts.num_read_failures += 1
            self._num_read_faults += 1
            if self._num_read_faults == MAX_READ_FAULTS:
                self.is_readable = False
                log.warning("cache store turned off for reading after %d failures in a row: %s", MAX_READ_FAULTS, error)
                return 0
            raise
        self._num_read_faults = 0
        return num_done

    def _look(self) -> None:
        assert self.store is not None
        try:
            self.store.look()
        except Exception as error:
            log.warning("the cache store cannot be looked through: %s", error)

    def _probe(self, move: Probe) -> int:
        assert self.store is not None
        for count, key in enumerate(move.keys):
            if not self.store.has(key):
                return count
        return len(move.keys)

    def _fetch(self, move: Move) -> int:
        assert isinstance(move, Fetch) and self.store is not None
        for count, (key, row) in enumerate(zip(move.keys, move.rows, strict=True)):
            if self._closing.is_set() or not self.store.read(key, self._slab.row(row)):
                return count
            self.counts.fetched_bytes += self.record_bytes
        return len(move.keys)

    def _write(self, move: Move) -> int:
        assert self.store is not None
        if isinstance(move, Remove):
            for key in move.keys:
                self.store.remove(key)
            return len(move.keys)
        assert isinstance(move, Write)
        for count, (key, row) in enumerate(zip(move.keys, move.rows, strict=True)):
            if not self.is_writable or self._closing.wait(self._rate.delay_s(self.record_bytes, time.monotonic())):
                return count
            try:
                self.store.write(key, self._slab.row(row))
            except Exception as error:
                # Mostly a full disk or lost rights: trying again for each block would only fill the log.
                self.counts.num_write_failures += 1
                self.is_writable = False
                log.warning("cache store turned off for writing: %s; what it holds is still read", error)
                return count
            self.counts.written_bytes += self.record_bytes
        return len(move.keys)


class RateCap:
    """A token bucket that holds one second's worth."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        """When everything granted so far has been paid for."""

    def delay_s(self, num_bytes: int, now_s: float) -> float:
        """Grant these bytes; how long to wait before they are used."""
        if self._bytes_per_s is None:
            return 0.0
        start_s = max(self._free_at_s, now_s - 1.0)
        self._free_at_s = start_s + num_bytes / self._bytes_per_s
        return max(0.0, self._free_at_s - now_s)


class _Lane:
    """One thread that carries out moves, urgent ones first, and tells of each end."""

    def __init__(
        self, name: str, act: Callable[[Move], int], end: Callable[[Move, int, float], None], *, first: Callable[[], None] = lambda: None
    ) -> None:
        self._first = first
        self._act = act
        self._end = end
        self._name = name
        self._queue: queue.PriorityQueue[tuple[int, int, Move | None]] = queue.PriorityQueue(MAX_QUEUED)
        self._serial = itertools.count(1)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"whalefall-cache-{name}", daemon=True)
        self._thread.start()

    def put(self, priority: int, move: Move) -> None:
        try:
            if self._is_closed:
                raise queue.Full
            self._queue.put_nowait((priority, next(self._serial), move))
        except queue.Full:
            self._end(move, 0, 0.0)

    def drain(self, until_s: float) -> None:
        """Wait until everything that was put has ended, or until then."""
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks and (left_s := until_s - time.monotonic()) > 0:
                self._queue.all_tasks_done.wait(left_s)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._queue.put((2, 0, None))  # behind all moves
        self._thread.join()

    def _run(self) -> None:
        self._first()
        while True:
            _, _, move = self._queue.get()
            if move is None:
                return
            num_done, started_s = 0, time.monotonic()
            if not self._is_closed:
                try:
                    num_done = self._act(move)
                except Exception:
                    log.exception("a cache move failed in the %s lane; its blocks are computed instead", self._name)
            self._end(move, num_done, time.monotonic() - started_s)
            self._queue.task_done()
