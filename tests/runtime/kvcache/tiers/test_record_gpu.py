# SPDX-License-Identifier: Apache-2.0
"""Records on a GPU: through pinned memory and a stream of their own, in several batches, the bytes are the same; and no copy waits for
the step that runs beside it, nor the step for a copy.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.kvcache.tiers.test_mover import KEYS, Bench
from tests.runtime.kvcache.tiers.test_record import block_bytes, make_spec
from whalefall.runtime.kvcache import pools
from whalefall.runtime.kvcache.tiers import record
from whalefall.runtime.kvcache.tiers.disk import BlockFiles
from whalefall.runtime.kvcache.tiers.layout import RecordLayout
from whalefall.runtime.kvcache.tiers.moves import Fetch, Load, Store, Write
from whalefall.runtime.kvcache.tiers.record import BlockCopier, HostSlab

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SLEEP_CYCLES = 2 * 10**9
"""About a second."""


def test_blocks_come_back_through_pinned_memory_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, num_blocks = make_spec(64, width=128), 100
    layout = RecordLayout.of(spec)
    monkeypatch.setattr(record, "CHUNK_BYTES", 7 * layout.record_bytes)
    cache = pools.allocate(spec, num_blocks, 1, torch.device("cuda"))
    for pool in cache.growing.values():
        pool.view(torch.uint8).random_(0, 256, generator=torch.Generator("cuda").manual_seed(1))
    before = {name: pool.view(num_blocks, -1).view(torch.uint8).clone() for name, pool in cache.growing.items()}
    slab = HostSlab(layout, 64, is_pinned=True)
    copier = BlockCopier(layout, cache.growing, num_blocks, slab)

    copier.store(range(1, 41), range(10, 50))
    for pool in cache.growing.values():
        pool.zero_()
    copier.load(range(10, 50), range(99, 59, -1))

    assert slab.records.is_pinned()
    for name, pool in cache.growing.items():
        after = pool.view(num_blocks, -1).view(torch.uint8)
        assert torch.equal(after[60:100].flip(0), before[name][1:41]) and not after[:60].any()


def test_copies_run_beside_the_step_and_do_not_wait_for_it() -> None:
    spec, num_blocks = make_spec(64, width=128), 20
    layout = RecordLayout.of(spec)
    cache = pools.allocate(spec, num_blocks, 1, torch.device("cuda"))
    slab = HostSlab(layout, 8, is_pinned=True)
    copier = BlockCopier(layout, cache.growing, num_blocks, slab)
    for pool in cache.growing.values():
        pool.view(num_blocks, -1).view(torch.uint8)[1:9] = 7
    torch.cuda.synchronize()  # as after a step whose results have been read
    copier.store(range(1, 9), range(8))
    copier.load(range(8), range(9, 17))  # memory for staging is there now

    torch.cuda._sleep(SLEEP_CYCLES)
    step_done = torch.cuda.Event()
    step_done.record()
    copier.store(range(1, 9), range(8))
    copier.load(range(8), range(11, 19))
    was_beside = not step_done.query()
    torch.cuda.synchronize()

    assert was_beside, "the copies have waited for the stream of the step"
    assert all((pool.view(num_blocks, -1).view(torch.uint8)[11:19] == 7).all() for pool in cache.growing.values())


def test_the_mover_brings_blocks_from_device_to_disk_and_back(tmp_path: Path) -> None:
    layout = RecordLayout.of(make_spec())
    one = Bench(BlockFiles(tmp_path, layout.layout_id, max_bytes=10**9), device="cuda")
    two = Bench(BlockFiles(tmp_path, layout.layout_id, max_bytes=10**9), device="cuda")
    try:
        torch.cuda.synchronize()
        stored = {name: [block_bytes(pool, b) for b in (2, 5)] for name, pool in one.cache.growing.items()}
        # One after the other, as the ledger asks for them: lanes know no order between each other.
        for bench, move in (
            (one, Store(1, KEYS[:2], (2, 5), (0, 3))),
            (one, Write(2, KEYS[:2], (0, 3))),
            (two, Fetch(1, KEYS[:2], (4, 1))),
            (two, Load(2, KEYS[:2], (6, 1), (4, 1))),
        ):
            assert bench.run(move) == [2]
        assert {name: [block_bytes(pool, b) for b in (6, 1)] for name, pool in two.cache.growing.items()} == stored
    finally:
        one.mover.close()
        two.mover.close()
