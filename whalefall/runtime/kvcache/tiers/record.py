# SPDX-License-Identifier: Apache-2.0
"""Records in host memory, and the copies between them and the device's pools. Which record belongs to which key is the ledger's work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from whalefall.runtime.kvcache.tiers.layout import FieldSpan, RecordLayout

CHUNK_BYTES = 32 * 2**20
"""Records cross between device and host in batches of about this size: the staging buffer on the device."""


class HostSlab:
    """One piece of host memory for `num_rows` records; pinned when blocks live on a GPU."""

    def __init__(self, layout: RecordLayout, num_rows: int, *, is_pinned: bool) -> None:
        self.layout = layout
        self.records = _zeros(num_rows, layout.record_bytes, is_pinned=is_pinned)

    @property
    def num_bytes(self) -> int:
        return self.records.numel()

    def row(self, row: int) -> memoryview:
        """The bytes of one record, to be read or filled in place."""
        return self.records[row].numpy().data


class BlockCopier:
    """Copies blocks between the device's pools and the slab. One thread at a time.

    On a GPU the copies run on a stream of their own, beside the step, and a call returns when they are done. They need not wait for the
    step's stream: what is stored was written by steps whose results have been read, what is loaded goes to blocks no launched step names.
    """

    def __init__(self, layout: RecordLayout, pools: Mapping[str, Tensor], num_blocks: int, slab: HostSlab) -> None:
        self._slab = slab
        self._blocks = [(span, _as_block_bytes(pools[span.name], num_blocks, span)) for span in layout.spans]
        self._device = self._blocks[0][1].device if self._blocks else torch.device("cpu")
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._chunk_rows = max(1, CHUNK_BYTES // max(1, layout.record_bytes))

    def store(self, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        self._in_chunks(block_ids, rows, self._store_chunk)

    def load(self, rows: Sequence[int], block_ids: Sequence[int]) -> None:
        self._in_chunks(block_ids, rows, self._load_chunk)

    def _in_chunks(self, block_ids: Sequence[int], rows: Sequence[int], copy: Callable[[Tensor, Tensor], None]) -> None:
        assert len(block_ids) == len(rows)
        with torch.inference_mode(), torch.cuda.stream(self._stream):  # a stream of None changes nothing
            for first in range(0, len(rows), self._chunk_rows):
                part = slice(first, first + self._chunk_rows)
                copy(torch.tensor(block_ids[part], dtype=torch.int64), torch.tensor(rows[part], dtype=torch.int64))
                if self._stream is not None:
                    self._stream.synchronize()  # the staging buffer is used again, and the caller counts on the bytes

    def _store_chunk(self, block_ids: Tensor, rows: Tensor) -> None:
        if self._stream is None:
            for span, blocks in self._blocks:
                self._slab.records[rows, span.offset : span.offset + span.num_bytes] = blocks[block_ids]
            return
        block_ids = block_ids.to(self._device)
        staging = torch.zeros((len(rows), self._slab.layout.record_bytes), dtype=torch.uint8, device=self._device)
        for span, blocks in self._blocks:
            staging[:, span.offset : span.offset + span.num_bytes] = blocks[block_ids]
        for at, row in enumerate(rows.tolist()):
            self._slab.records[row].copy_(staging[at], non_blocking=True)

    def _load_chunk(self, block_ids: Tensor, rows: Tensor) -> None:
        if self._stream is None:
            for span, blocks in self._blocks:
                blocks[block_ids] = self._slab.records[rows, span.offset : span.offset + span.num_bytes]
            return
        block_ids = block_ids.to(self._device)
        staging = torch.empty((len(rows), self._slab.layout.record_bytes), dtype=torch.uint8, device=self._device)
        for at, row in enumerate(rows.tolist()):
            staging[at].copy_(self._slab.records[row], non_blocking=True)
        for span, blocks in self._blocks:
            blocks[block_ids] = staging[:, span.offset : span.offset + span.num_bytes]


def _zeros(num_rows: int, num_bytes: int, *, is_pinned: bool) -> Tensor:
    if is_pinned:
        return torch.zeros((num_rows, num_bytes), dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.zeros((num_rows, num_bytes), dtype=np.uint8))  # zero pages: taken from the system when first used


def _as_block_bytes(pool: Tensor, num_blocks: int, span: FieldSpan) -> Tensor:
    """A view of a pool as [num_blocks, bytes of one block]."""
    assert pool.is_contiguous() and pool.shape[0] % num_blocks == 0, (
        f"{span.name}: a pool of {tuple(pool.shape)} is not {num_blocks} blocks"
    )
    blocks = pool.view(num_blocks, -1).view(torch.uint8)
    assert blocks.shape[1] == span.num_bytes, f"{span.name}: {blocks.shape[1]} bytes per block, the layout says {span.num_bytes}"
    return blocks
