# SPDX-License-Identifier: Apache-2.0
"""How many blocks fit: the worker's memory, to the byte, before anything is allocated.

Pure arithmetic over a CacheSpec, so that it serves a running engine and a plan for a machine one does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

from whalefall.core.cache_spec import CacheSpec
from whalefall.core.errors import ConfigError

INT32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMemory:
    """What a worker takes, apart from weights and activations."""

    num_blocks: int
    """Counting the null block 0."""
    num_slots: int
    block_bytes: int
    slot_bytes: int
    table_bytes: int
    """Token table and block tables."""
    snapshot_bytes: int = 0
    """Per block, beside it: the copy of a request's fixed state that exact replay keeps."""
    step_logits_bytes: int
    """Most that the logits of one step can take: a step whose rows are all prompt rows to score."""

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * (self.block_bytes + self.snapshot_bytes) + self.num_slots * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        return self.pool_bytes + self.table_bytes

    def lines(self) -> list[str]:
        """A table for people."""
        rows = (
            ("blocks", f"{self.num_blocks:,} x {self.block_bytes:,}", self.num_blocks * self.block_bytes),
            ("window snapshots", f"{self.num_blocks:,} x {self.snapshot_bytes:,}", self.num_blocks * self.snapshot_bytes),
            ("state slots", f"{self.num_slots:,} x {self.slot_bytes:,}", self.num_slots * self.slot_bytes),
            ("tables", "token ids, block ids", self.table_bytes),
            ("total", "", self.total_bytes),
            ("logits of a step", "at most, when every row is scored", self.step_logits_bytes),
        )
        return [f"{name:<18}{how:<36}{count:>20,} bytes" for name, how, count in rows]


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // block_tokens)


def plan_memory(
    spec: CacheSpec,
    *,
    num_slots: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    vocab_size: int,
    kv_cache_memory_bytes: int | None = None,
    keeps_snapshots: bool = False,
) -> WorkerMemory:
    """Choose the number of blocks.

    Args:
        keeps_snapshots: each block has a copy of the fixed state beside it.
        kv_cache_memory_bytes: for blocks and state slots together; None takes as many blocks as can ever be used at once, every slot at
            the longest context.
    Raises:
        ConfigError: the budget does not hold one request of max_model_len.
    """
    snapshot_bytes = spec.snapshot_bytes if keeps_snapshots else 0
    bytes_per_block = spec.block_bytes + snapshot_bytes
    per_request = blocks_for(max_model_len, spec.block_tokens)
    most = num_slots * per_request + 1
    num_blocks = most
    if kv_cache_memory_bytes is not None and spec.block_bytes:
        num_blocks = min(most, (kv_cache_memory_bytes - num_slots * spec.slot_bytes) // bytes_per_block)
    if num_blocks < per_request + 1:
        needed = (per_request + 1) * bytes_per_block + num_slots * spec.slot_bytes
        raise ConfigError(
            f"kv_cache_memory_bytes is {kv_cache_memory_bytes:,}, but one request of max_model_len {max_model_len:,} with max_num_seqs "
            f"{num_slots:,} needs {needed:,}: raise it, or lower max_model_len or max_num_seqs"
        )
    return WorkerMemory(
        num_blocks=num_blocks,
        num_slots=num_slots,
        block_bytes=spec.block_bytes,
        slot_bytes=spec.slot_bytes,
        snapshot_bytes=snapshot_bytes,
        table_bytes=INT32_BYTES * num_slots * (max_model_len + 1 + per_request),
        step_logits_bytes=max_num_batched_tokens * vocab_size * 4,
    )
