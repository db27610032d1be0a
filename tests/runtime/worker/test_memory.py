# SPDX-License-Identifier: Apache-2.0
"""The planned memory is the allocated memory, and a budget that is too small says what would do."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.worker.probe import SPEC
from whalefall.core.errors import ConfigError
from whalefall.runtime.kvcache import pools
from whalefall.runtime.worker.memory import WorkerMemory, plan_memory
from whalefall.runtime.worker.tables import SlotTables


def plan(kv_cache_memory_bytes: int | None) -> WorkerMemory:
    return plan_memory(
        SPEC, num_slots=3, max_model_len=30, max_num_batched_tokens=64, vocab_size=97, kv_cache_memory_bytes=kv_cache_memory_bytes
    )


def test_without_a_budget_every_slot_can_be_full() -> None:
    assert plan(None).num_blocks == 3 * 8 + 1


def test_planned_bytes_are_the_allocated_bytes() -> None:
    memory = plan(600)
    cache = pools.allocate(SPEC, memory.num_blocks, memory.num_slots, torch.device("cpu"))
    tables = SlotTables(3, 30, SPEC.block_tokens, torch.device("cpu"))
    assert pools.cache_bytes(cache) == memory.pool_bytes
    assert sum(t.numel() * t.element_size() for t in (tables.token_ids, tables.block_ids)) == memory.table_bytes
    assert memory.pool_bytes <= 600 < memory.pool_bytes + memory.block_bytes
    assert any(f"{memory.total_bytes:,} bytes" in line for line in memory.lines())


def test_a_budget_below_one_request_is_refused_with_the_number_that_would_do() -> None:
    needed = 9 * SPEC.block_bytes + 3 * SPEC.slot_bytes
    assert plan(needed).num_blocks == 9
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes is {needed - 1:,}.*needs {needed:,}"):
        plan(needed - 1)
