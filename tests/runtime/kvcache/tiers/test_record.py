# SPDX-License-Identifier: Apache-2.0
"""Records: a block that goes to the host and comes back is the same bytes, and no other block is touched."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from whalefall.core.batch import CacheTensors
from whalefall.core.cache_spec import CacheSpec, GrowingField, RingField, StateField
from whalefall.runtime.kvcache import pools
from whalefall.runtime.kvcache.tiers.layout import ALIGN_BYTES, RecordLayout
from whalefall.runtime.kvcache.tiers.record import BlockCopier, HostSlab

NUM_BLOCKS, NUM_ROWS = 7, 5


def make_spec(block_tokens: int = 4, *, width: int = 3, dtype: str = "float32", name: str = "layers.2.main", ratio: int = 2) -> CacheSpec:
    growing = (
        GrowingField(name=name, width=width, dtype=dtype, tokens_per_entry=ratio),
        GrowingField(name="layers.2.index", width=5, dtype="bfloat16", tokens_per_entry=2),
        GrowingField(name="layers.20.main", width=7, dtype="uint8", tokens_per_entry=1),
    )
    return CacheSpec(block_tokens=block_tokens, growing=growing)


def filled_cache(spec: CacheSpec, seed: int, device: str = "cpu") -> CacheTensors:
    cache = pools.allocate(spec, NUM_BLOCKS, 1, torch.device(device))
    generator = torch.Generator(device).manual_seed(seed)
    for pool in cache.growing.values():
        pool.view(torch.uint8).random_(0, 256, generator=generator)  # any bytes: NaN patterns too
    return cache


def block_bytes(pool: torch.Tensor, block_id: int) -> bytes:
    return pool.view(NUM_BLOCKS, -1)[block_id].view(torch.uint8).cpu().numpy().tobytes()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_reloaded_blocks_hold_the_bytes_that_were_stored_and_others_are_untouched(data: st.DataObject) -> None:
    spec = make_spec()
    layout = RecordLayout.of(spec)
    cache, slab = filled_cache(spec, 1), HostSlab(layout, NUM_ROWS, is_pinned=False)
    copier = BlockCopier(layout, cache.growing, NUM_BLOCKS, slab)
    count = data.draw(st.integers(0, NUM_ROWS))
    sources = data.draw(st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=count, max_size=count))
    rows = data.draw(st.permutations(range(NUM_ROWS)))[:count]
    targets = data.draw(st.permutations(range(1, NUM_BLOCKS)))[:count]
    stored = {name: [block_bytes(pool, b) for b in sources] for name, pool in cache.growing.items()}

    copier.store(sources, rows)
    other = filled_cache(spec, 2)
    before = {name: pool.clone() for name, pool in other.growing.items()}
    BlockCopier(layout, other.growing, NUM_BLOCKS, slab).load(rows, targets)

    for name, pool in other.growing.items():
        assert [block_bytes(pool, b) for b in targets] == stored[name]
        untouched = [b for b in range(NUM_BLOCKS) if b not in targets]
        assert [block_bytes(pool, b) for b in untouched] == [block_bytes(before[name], b) for b in untouched]


def spec_with_state() -> CacheSpec:
    spec = make_spec()
    rings = (RingField(name="layers.0.window", width=3, dtype="bfloat16", rows=8, group="encoder"),)
    return CacheSpec(block_tokens=4, growing=spec.growing, rings=rings, states=(StateField(name="tail", shape=(2, 5), dtype="float32"),))


def test_snapshots_travel_with_their_block() -> None:
    spec = spec_with_state()
    layout = RecordLayout.of(spec, with_snapshots=True)
    cache = pools.allocate(spec, NUM_BLOCKS, 1, torch.device("cpu"), with_snapshots=True)
    for snapshot in cache.snapshots.values():
        snapshot.copy_(torch.randn(snapshot.shape, generator=torch.Generator().manual_seed(1)))
    slab = HostSlab(layout, NUM_ROWS, is_pinned=False)
    copier = BlockCopier(layout, {**cache.growing, **cache.snapshots}, NUM_BLOCKS, slab)
    copier.store([3], [0])
    copier.load([0], [5])
    assert set(cache.snapshots) == {"layers.0.window", "tail"}
    assert all(torch.equal(s[5], s[3]) and not torch.equal(s[4], s[3]) for s in cache.snapshots.values())


def test_fields_lie_in_layer_order_without_overlap() -> None:
    layout = RecordLayout.of(make_spec())
    ends = [span.offset + span.num_bytes for span in layout.spans]
    assert [span.name for span in layout.spans] == ["layers.2.main", "layers.2.index", "layers.20.main"]
    assert all(span.offset % ALIGN_BYTES == 0 for span in layout.spans)
    assert all(end <= span.offset for end, span in zip(ends, layout.spans[1:], strict=False)) and ends[-1] <= layout.record_bytes


@pytest.mark.parametrize(
    "changed",
    [
        make_spec(8),
        make_spec(width=4),
        make_spec(dtype="bfloat16"),
        make_spec(name="layers.3.main"),
        make_spec(ratio=1),
    ],
    ids=["block size", "width", "dtype", "field", "ratio"],
)
def test_whatever_changes_the_meaning_of_the_bytes_changes_the_layout_id(changed: CacheSpec) -> None:
    assert RecordLayout.of(changed).layout_id != RecordLayout.of(make_spec()).layout_id


def test_snapshots_and_tags_change_the_layout_id() -> None:
    spec = spec_with_state()
    ids = [RecordLayout.of(spec, **options).layout_id for options in ({}, {"with_snapshots": True}, {"tag": "2.0 cpu"}, {})]
    assert len(set(ids)) == 3 and ids[0] == ids[3]


def test_a_pool_that_does_not_match_the_layout_is_refused() -> None:
    layout = RecordLayout.of(make_spec())
    slab = HostSlab(layout, NUM_ROWS, is_pinned=False)
    with pytest.raises(AssertionError, match="bytes per block"):
        BlockCopier(layout, filled_cache(make_spec(8), 1).growing, NUM_BLOCKS, slab)
