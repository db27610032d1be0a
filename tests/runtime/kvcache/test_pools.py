# SPDX-License-Identifier: Apache-2.0
"""The pools are what the spec says, to the byte, and a slot or block goes clean to its next user."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whalefall.core.cache_spec import DTYPE_BYTES, CacheSpec, GrowingField, RingField, StateField
from whalefall.runtime.kvcache.pools import allocate, cache_bytes, reset_slot, scrub

dtypes = st.sampled_from(sorted(DTYPE_BYTES))
CPU = torch.device("cpu")


@st.composite
def some_specs(draw: st.DrawFn) -> CacheSpec:
    growing = [
        GrowingField(name=f"g{i}", width=draw(st.integers(1, 9)), dtype=draw(dtypes), tokens_per_entry=draw(st.sampled_from([1, 2, 4])))
        for i in range(draw(st.integers(0, 3)))
    ]
    rings = [
        RingField(name=f"r{i}", width=draw(st.integers(1, 9)), dtype=draw(dtypes), rows=(3, 5)[i % 2], group=f"group{i % 2}")
        for i in range(draw(st.integers(0, 4)))
    ]
    states = [
        StateField(name=f"s{i}", shape=tuple(draw(st.lists(st.integers(1, 3), max_size=3))), dtype=draw(dtypes))
        for i in range(draw(st.integers(0, 2)))
    ]
    return CacheSpec(block_tokens=8, growing=tuple(growing), rings=tuple(rings), states=tuple(states))


@settings(deadline=None)
@given(spec=some_specs(), num_blocks=st.integers(1, 5), num_slots=st.integers(1, 4))
def test_pools_take_the_bytes_of_the_spec(spec: CacheSpec, num_blocks: int, num_slots: int) -> None:
    cache = allocate(spec, num_blocks, num_slots, CPU)
    assert cache_bytes(cache) == num_blocks * spec.block_bytes + num_slots * spec.slot_bytes
    assert all(tag.dtype == torch.int32 and (tag == -1).all() for tag in cache.tags.values())
    assert {name: tuple(pool.shape) for name, pool in cache.growing.items()} == {
        f.name: (num_blocks * 8 // f.tokens_per_entry, f.width) for f in spec.growing
    }


SPEC = CacheSpec(
    block_tokens=4,
    growing=(
        GrowingField(name="wide", width=2, dtype="float32", tokens_per_entry=1),
        GrowingField(name="packed", width=3, dtype="uint8", tokens_per_entry=2),
    ),
    rings=(RingField(name="ring", width=2, dtype="bfloat16", rows=3, group="window"),),
    states=(StateField(name="state", shape=(2, 2), dtype="float32"),),
)


def test_reset_clears_one_slot_and_no_other() -> None:
    cache = allocate(SPEC, 3, 3, CPU)
    cache.tags["window"][:] = 5
    cache.states["state"][:] = 2.0
    reset_slot(cache, 1)
    assert cache.tags["window"].tolist() == [[5] * 3, [-1] * 3, [5] * 3]
    assert cache.states["state"].sum((1, 2)).tolist() == [8.0, 0.0, 8.0]


def test_scrub_removes_poison_and_keeps_finite_entries() -> None:
    cache = allocate(SPEC, 4, 2, CPU)
    cache.growing["wide"][:] = torch.arange(16)[:, None]
    cache.growing["wide"][[5, 9, 13]] = math.nan
    cache.growing["wide"][6, 1] = -math.inf
    cache.rings["ring"][:] = math.nan
    cache.growing["packed"][:] = 255
    scrub(cache, 0, [1, 3], num_blocks=4)
    wide = cache.growing["wide"]
    assert wide[:, 0].nan_to_num(-1).tolist() == [0, 1, 2, 3, 4, 0, 6, 7, 8, -1, 10, 11, 12, 0, 14, 15]
    assert wide[6].tolist() == [6.0, 0.0]
    assert (cache.rings["ring"][0] == 0).all()
    assert cache.rings["ring"][1].isnan().all()
    assert (cache.growing["packed"] == 255).all()
