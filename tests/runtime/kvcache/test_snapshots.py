# SPDX-License-Identifier: Apache-2.0
"""Snapshots give another slot the fixed state that stood where a block ends: rows, tags and states."""

from __future__ import annotations

import pytest
import torch

from whalefall.core.batch import CacheTensors
from whalefall.core.cache_spec import CacheSpec, GrowingField, RingField, StateField
from whalefall.runtime.kvcache.pools import allocate, cache_bytes, restore_snapshot, take_snapshots

SPEC = CacheSpec(
    block_tokens=4,
    growing=(GrowingField(name="main", width=3, dtype="float32", tokens_per_entry=2),),
    rings=(
        RingField(name="window", width=2, dtype="float32", rows=6, group="w"),
        RingField(name="pending", width=1, dtype="float32", rows=2, group="p"),
    ),
    states=(StateField(name="sum", shape=(2, 2), dtype="float32"),),
)


def made(device: str = "cpu") -> CacheTensors:
    return allocate(SPEC, 5, 3, torch.device(device), with_snapshots=True)


def fill(cache: CacheTensors, slot: int, num_tokens: int) -> None:
    """As if positions [0, num_tokens) had run in a slot."""
    for position in range(num_tokens):
        for name, group in (("window", "w"), ("pending", "p")):
            rows = cache.rings[name].shape[1]
            cache.rings[name][slot, position % rows] = position + 0.5
            cache.tags[group][slot, position % rows] = position
    cache.states["sum"][slot] = num_tokens


@pytest.mark.parametrize("position", [4, 8, 12, 16])
def test_restored_slot_is_the_slot_as_it_was(position: int) -> None:
    cache = made()
    fill(cache, 0, position)
    expected = [t[0].clone() for t in (*cache.rings.values(), *cache.tags.values(), *cache.states.values())]
    take_snapshots(cache, [0], [3])
    fill(cache, 0, position + 5)
    fill(cache, 2, 9)

    restore_snapshot(cache, 2, 3, position)

    restored = [t[2] for t in (*cache.rings.values(), *cache.tags.values(), *cache.states.values())]
    assert all(torch.equal(a, b) for a, b in zip(restored, expected, strict=True))


def test_snapshots_of_several_slots_go_each_to_its_block() -> None:
    cache = made()
    fill(cache, 0, 4)
    fill(cache, 1, 8)
    take_snapshots(cache, [1, 0], [2, 4])

    assert [float(cache.snapshots["sum"][block, 0, 0]) for block in range(5)] == [0, 0, 8, 0, 4]


def test_snapshots_are_counted_to_the_byte_and_absent_unless_asked_for() -> None:
    assert SPEC.snapshot_bytes == 4 * (6 * 2 + 2 * 1 + 4)
    assert SPEC.replay_rows == 6
    plain = allocate(SPEC, 5, 3, torch.device("cpu"))
    assert cache_bytes(made()) - cache_bytes(plain) == 5 * SPEC.snapshot_bytes
    assert plain.snapshots == {}
