# SPDX-License-Identifier: Apache-2.0
"""Records on a GPU: through pinned memory and a stream of their own, in several batches, the bytes are the same."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.kvcache.tiers.test_record import make_spec
from whalefall.runtime.kvcache import pools
from whalefall.runtime.kvcache.tiers import record
from whalefall.runtime.kvcache.tiers.layout import RecordLayout
from whalefall.runtime.kvcache.tiers.record import BlockCopier, HostSlab


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
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
