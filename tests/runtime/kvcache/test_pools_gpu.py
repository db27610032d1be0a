# SPDX-License-Identifier: Apache-2.0
"""Pools on a GPU: snapshots, resets and scrubbing leave there what they leave on a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.runtime.kvcache.test_snapshots import SPEC, fill, made
from whalefall.core.batch import CacheTensors
from whalefall.runtime.kvcache.pools import allocate, cache_bytes, reset_slot, restore_snapshot, scrub, take_snapshots

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def tensors_of(cache: CacheTensors) -> Iterator[Tensor]:
    for group in (cache.growing, cache.rings, cache.tags, cache.states, cache.snapshots):
        yield from (tensor.cpu() for tensor in group.values())


@pytest.mark.parametrize("position", [4, 8, 12, 16])
def test_snapshots_are_those_of_a_cpu(position: int) -> None:
    on_cpu, on_gpu = made(), made("cuda")
    for cache in (on_cpu, on_gpu):
        fill(cache, 1, position)
        fill(cache, 0, 3)
        take_snapshots(cache, [1, 0], [3, 2])
        fill(cache, 1, position + 5)
        reset_slot(cache, 0)
        restore_snapshot(cache, 2, 3, position)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(on_cpu), tensors_of(on_gpu), strict=True))


def test_scrub_removes_poison_and_keeps_finite_entries() -> None:
    on_cpu, on_gpu = made(), made("cuda")
    for cache in (on_cpu, on_gpu):
        fill(cache, 1, 9)
        pool = cache.growing["main"]
        pool[:] = torch.arange(pool.numel(), device=pool.device).view(pool.shape)
        pool[[2, 5, 7]] = math.nan
        cache.rings["window"][1, 3] = math.inf
        scrub(cache, 1, [1, 3], num_blocks=5)
    assert all(torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)) for a, b in zip(tensors_of(on_cpu), tensors_of(on_gpu), strict=True))


def test_the_device_gives_the_bytes_that_the_spec_says() -> None:
    def requested() -> int:
        return torch.cuda.memory_stats()["requested_bytes.all.current"]  # what was asked for, without the allocator's rounding

    before = requested()
    cache = allocate(SPEC, 10_000, 64, torch.device("cuda"), with_snapshots=True)
    assert requested() - before == cache_bytes(cache)
