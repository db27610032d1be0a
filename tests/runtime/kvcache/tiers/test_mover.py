# SPDX-License-Identifier: Apache-2.0
"""The mover reports every move exactly once, whatever the disk does, and never raises into the step loop."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.runtime.kvcache.tiers.test_record import NUM_BLOCKS, NUM_ROWS, block_bytes, filled_cache, make_spec
from whalefall.runtime.kvcache.tiers.disk import BlockFiles
from whalefall.runtime.kvcache.tiers.layout import RecordLayout
from whalefall.runtime.kvcache.tiers.mover import MAX_READ_FAULTS, Mover, RateCap
from whalefall.runtime.kvcache.tiers.moves import Fetch, Load, Move, MoveReport, Probe, Remove, Store, Write
from whalefall.runtime.kvcache.tiers.record import BlockCopier, HostSlab
from whalefall.runtime.kvcache.tiers.store import BlockStore, StoreCounts

KEYS = tuple(bytes([n]) * 16 for n in range(8))


class FaultyStore:
    """Fails where told to; otherwise keeps records in a dictionary."""

    def __init__(self, *, on_read: Exception | None = None, on_write: Exception | None = None) -> None:
        self.counts, self.max_bytes = StoreCounts(), 0
        self.on_read, self.on_write = on_read, on_write
        self.records: dict[bytes, bytes] = {}
        self.num_tries = 0

    def look(self) -> None:
        pass

    def has(self, key: bytes) -> bool:
        return key in self.records

    def read(self, key: bytes, record: memoryview) -> bool:
        self.num_tries += 1
        if self.on_read is not None:
            raise self.on_read
        if key not in self.records:
            return False
        record[:] = self.records[key]
        return True

    def write(self, key: bytes, record: memoryview) -> None:
        self.num_tries += 1
        if self.on_write is not None:
            raise self.on_write
        self.records[key] = bytes(record)

    def remove(self, key: bytes) -> None:
        self.records.pop(key, None)


class Bench:
    """A mover with pools of random bytes, and a way to wait for reports."""

    def __init__(self, store: BlockStore | None, write_bytes_per_s: int | None = None, device: str = "cpu") -> None:
        spec = make_spec()
        self.layout = RecordLayout.of(spec)
        self.cache = filled_cache(spec, 1, device)
        self.slab = HostSlab(self.layout, NUM_ROWS, is_pinned=device == "cuda")
        self.woken = threading.Condition()
        copier = BlockCopier(self.layout, self.cache.growing, NUM_BLOCKS, self.slab)
        self.mover = Mover(copier, self.slab, store, write_bytes_per_s=write_bytes_per_s, wake=self._wake)
        self.reports: dict[int, MoveReport] = {}

    def _wake(self) -> None:
        with self.woken:
            self.woken.notify_all()

    def run(self, *moves: Move) -> list[int]:
        """What each of these moves has done, in order."""
        self.mover.submit(moves)
        with self.woken:
            assert self.woken.wait_for(lambda: self._take() and all(m.move_id in self.reports for m in moves), timeout=20)
        return [self.reports[m.move_id].num_done for m in moves]

    def _take(self) -> bool:
        for report in self.mover.take_reports():
            assert report.move_id not in self.reports, f"move {report.move_id} is reported twice"
            self.reports[report.move_id] = report
        return True


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(store: BlockStore | None, write_bytes_per_s: int | None = None) -> Bench:
        made.append(Bench(store, write_bytes_per_s))
        return made[-1]

    yield make
    for one in made:
        one.mover.close()


def test_a_block_comes_back_through_host_and_disk(bench: Callable[..., Bench], tmp_path: Path) -> None:
    a = bench(BlockFiles(tmp_path, RecordLayout.of(make_spec()).layout_id, max_bytes=10**9))
    stored = {name: [block_bytes(pool, b) for b in (2, 5)] for name, pool in a.cache.growing.items()}
    assert a.run(Store(1, KEYS[:2], (2, 5), (0, 3))) == [2]
    assert a.run(Write(2, KEYS[:2], (0, 3))) == [2]

    b = bench(BlockFiles(tmp_path, RecordLayout.of(make_spec()).layout_id, max_bytes=10**9))
    assert b.run(Probe(1, KEYS[:4])) == [2]
    assert b.run(Fetch(2, KEYS[:3], (4, 1, 2))) == [2]
    assert b.run(Load(3, KEYS[:2], (6, 1), (4, 1))) == [2]
    assert {name: [block_bytes(pool, i) for i in (6, 1)] for name, pool in b.cache.growing.items()} == stored
    counts, record_bytes = b.mover.counts, b.layout.record_bytes
    assert (counts.fetched_bytes, counts.loaded_bytes, a.mover.counts.written_bytes) == (2 * record_bytes,) * 3


def test_a_full_disk_turns_writing_off_with_one_warning_and_reading_goes_on(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore(on_write=OSError(errno.ENOSPC, "No space left on device"))
    one = bench(store)
    store.records[KEYS[5]] = bytes(one.layout.record_bytes)
    with caplog.at_level(logging.WARNING, logger="whalefall"):
        assert one.run(Write(1, KEYS[:2], (0, 1)), Write(2, KEYS[2:3], (2,))) == [0, 0]
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "No space left" in caplog.text
    assert store.num_tries == 1 and one.mover.counts.num_write_failures == 1
    assert one.run(Fetch(3, KEYS[5:6], (0,))) == [1]


def test_a_read_error_is_a_miss_and_a_dead_store_is_left_alone(bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore(on_read=OSError(errno.EIO, "Input/output error"))
    one = bench(store)
    with caplog.at_level(logging.CRITICAL, logger="whalefall"):
        assert one.run(*[Fetch(n, KEYS[:1], (0,)) for n in range(MAX_READ_FAULTS + 5)]) == [0] * (MAX_READ_FAULTS + 5)
    assert store.num_tries == MAX_READ_FAULTS and not one.mover.is_readable
    assert one.run(Write(99, KEYS[:1], (0,))) == [1]


def test_a_removal_comes_after_the_writes_before_it(bench: Callable[..., Bench]) -> None:
    store = FaultyStore()
    one = bench(store)
    assert one.run(Write(1, KEYS[:2], (0, 1)), Remove(2, KEYS[:1])) == [2, 1]
    assert set(store.records) == {KEYS[1]}


def test_closing_reports_what_is_queued_and_refuses_what_comes_later(bench: Callable[..., Bench]) -> None:
    one = bench(FaultyStore(), write_bytes_per_s=1)  # the first write would wait for ages
    moves = [Write(n, KEYS[:1], (0,)) for n in range(3)]
    one.mover.submit(moves)
    one.mover.close()
    one.mover.submit([Store(7, KEYS[:1], (1,), (0,))])
    assert sorted((r.move_id, r.num_done) for r in one.mover.take_reports()) == [(0, 0), (1, 0), (2, 0), (7, 0)]


def test_the_rate_cap_spreads_writes_over_time() -> None:
    cap = RateCap(1_000)
    assert cap.delay_s(1_000, 50.0) == 0.0  # a second's worth is at hand after a rest
    assert cap.delay_s(500, 50.0) == pytest.approx(0.5)
    assert cap.delay_s(500, 50.5) == pytest.approx(0.5)
    assert cap.delay_s(10, 1_000.0) == 0.0
    assert RateCap(None).delay_s(10**12, 0.0) == 0.0


def test_a_copy_that_fails_is_reported_as_not_done(bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    one = bench(None)
    with caplog.at_level(logging.CRITICAL, logger="whalefall"):
        assert one.run(Store(1, KEYS[:1], (NUM_BLOCKS + 100,), (0,))) == [0]
    assert one.mover.counts.num_copy_failures == 1
    assert one.run(Store(2, KEYS[:1], (1,), (0,))) == [1]
    assert torch.equal(one.slab.records[0, :24], one.cache.growing["layers.2.main"].view(NUM_BLOCKS, -1)[1].view(torch.uint8)[:24])
