# SPDX-License-Identifier: Apache-2.0
"""The memory behind a CacheSpec: block pools, window rings with their tags, states.

Knows tensors and nothing of who uses which block; `manager` does that bookkeeping without torch. Allocated once at start by the worker,
to the byte of what the spec says. Slots and blocks are cleaned here, because their next user must not see what the last one left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from whalefall.core.batch import CacheTensors
from whalefall.core.cache_spec import DTYPE_BYTES, CacheSpec

EMPTY_TAG = -1
"""Tag of a ring row that holds nothing."""


def allocate(spec: CacheSpec, num_blocks: int, num_slots: int, device: torch.device, *, with_snapshots: bool = False) -> CacheTensors:
    """Make the pools of `spec`, zeroed, with every ring row marked empty.

    Args:
        num_blocks: physical blocks, counting the null block 0.
        num_slots: requests that may hold state at once.
        with_snapshots: room for a copy of the fixed state beside each block, `spec.snapshot_bytes` each.
    """
    assert num_blocks >= 1 and num_slots >= 1, f"{num_blocks} blocks and {num_slots} slots: both must be at least 1"

    def zeros(shape: tuple[int, ...], dtype: str) -> Tensor:
        if device.type == "cpu":
            # The system's zero pages: memory is touched when a block is first used, not at start.
            count = math.prod(shape) * DTYPE_BYTES[dtype]
            return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(getattr(torch, dtype)).view(shape)
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

    cache = CacheTensors(
        growing={f.name: zeros((num_blocks * (spec.block_tokens // f.tokens_per_entry), f.width), f.dtype) for f in spec.growing},
        rings={f.name: zeros((num_slots, f.rows, f.width), f.dtype) for f in spec.rings},
        tags={g: torch.full((num_slots, spec.ring_rows(g)), EMPTY_TAG, dtype=torch.int32, device=device) for g in spec.ring_groups},
        states={f.name: zeros((num_slots, *f.shape), f.dtype) for f in spec.states},
        block_tokens=spec.block_tokens,
        snapshots=_snapshots(spec, num_blocks, zeros) if with_snapshots else {},
    )
    block_bytes = spec.block_bytes + (spec.snapshot_bytes if with_snapshots else 0)
    expected = num_blocks * block_bytes + num_slots * spec.slot_bytes
    assert cache_bytes(cache) == expected, f"pools take {cache_bytes(cache):,} bytes, the spec says {expected:,}"
    return cache


def cache_bytes(cache: CacheTensors) -> int:
    """Bytes of all pools together."""
    return sum(t.numel() * t.element_size() for t in _tensors(cache))


def reset_slot(cache: CacheTensors, slot: int) -> None:
    """Make a slot ready for a new request: its ring rows are empty and its states zero.

    Ring rows keep their bytes: a row whose tag does not match is never read.
    """
    for tag in cache.tags.values():
        tag[slot] = EMPTY_TAG
    for state in cache.states.values():
        state[slot] = 0


def take_snapshots(cache: CacheTensors, slots: Sequence[int], block_ids: Sequence[int]) -> None:
    """Copy the fixed state of each slot beside a block that ends where the slot's computed rows end."""
    slot_B, block_B = _pair(cache, slots, block_ids)
    for name, snapshot in cache.snapshots.items():
        snapshot[block_B] = _fixed_state(cache, name)[slot_B]


def restore_snapshot(cache: CacheTensors, slot: int, block_id: int, position: int) -> None:
    """Give a slot the fixed state that a block keeps.

    Args:
        position: where the block ends; ring rows hold the positions right before it.
    """
    for name, snapshot in cache.snapshots.items():
        _fixed_state(cache, name)[slot] = snapshot[block_id]
    for tag in cache.tags.values():
        rows = tag.shape[1]
        newest_R = position - 1 - (position - 1 - torch.arange(rows, dtype=torch.int32)) % rows
        tag[slot] = torch.where(newest_R >= 0, newest_R, EMPTY_TAG).to(tag.device, non_blocking=True)


def scrub(cache: CacheTensors, slot: int, block_ids: Sequence[int], num_blocks: int) -> None:
    """Remove NaN and infinity from what a faulted request leaves behind.

    A masked read multiplies a stale value by zero, and zero times NaN is NaN: without this the next owner of a block could fail for a
    fault that is not its own. Finite entries keep their value, so blocks shared with a healthy request are not harmed. Pools of
    packed bytes are left as they are: a look at single bytes cannot tell a NaN.
    """
    reset_slot(cache, slot)
    for ring in cache.rings.values():
        ring[slot] = 0
    if not block_ids:
        return
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    for pool in cache.growing.values():
        if not pool.is_floating_point():
            continue
        per_block = pool.shape[0] // num_blocks
        entries = (blocks[:, None] * per_block + torch.arange(per_block)).flatten().to(pool.device)
        rows = pool[entries]
        pool[entries] = torch.where(torch.isfinite(rows), rows, torch.zeros_like(rows))


def _snapshots(spec: CacheSpec, num_blocks: int, zeros: Callable[[tuple[int, ...], str], Tensor]) -> dict[str, Tensor]:
    rings = {f.name: zeros((num_blocks, f.rows, f.width), f.dtype) for f in spec.rings}
    return rings | {f.name: zeros((num_blocks, *f.shape), f.dtype) for f in spec.states}


def _fixed_state(cache: CacheTensors, name: str) -> Tensor:
    return cache.rings[name] if name in cache.rings else cache.states[name]


def _pair(cache: CacheTensors, slots: Sequence[int], block_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    device = next(iter(cache.snapshots.values())).device
    slot_B, block_B = torch.tensor([slots, block_ids], dtype=torch.int64).to(device, non_blocking=True)
    return slot_B, block_B


def _tensors(cache: CacheTensors) -> Iterator[Tensor]:
    for group in (cache.growing, cache.rings, cache.tags, cache.states, cache.snapshots):
        yield from group.values()
