# SPDX-License-Identifier: Apache-2.0
"""MappedShard: the tensors of one shard as views of the mapped file. Nothing is copied, nothing is read before it is touched.

A view keeps the mapping alive. `release` gives touched pages back to the system; a view that outlives it reads them again from the file.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor

from whalefall.weights.safetensors import StoredTensor

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""E8M0 scales are handed out as their bytes: few torch operations know the exponent-only type."""

# Private and writable because torch wants writable memory; nobody writes. NORESERVE keeps a shard larger than memory mappable.
_FLAGS = mmap.MAP_PRIVATE | (getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0)


class MappedShard:
    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, flags=_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def tensor(self, stored: StoredTensor) -> Tensor:
        """A view of the file; a copy only where the file places the tensor off its natural alignment."""
        dtype = TORCH_DTYPES[stored.dtype]
        if stored.num_bytes == 0:
            return torch.empty(stored.shape, dtype=dtype)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=stored.num_bytes, offset=stored.begin)
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(stored.shape)

    def release(self, begin: int, end: int) -> None:
        """Let the system take back the whole pages inside [begin, end)."""
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, length)
