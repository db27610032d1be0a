# SPDX-License-Identifier: Apache-2.0
"""A block as one record of bytes: every growing field of the block, end to end in layer order, and the window snapshots of exact mode.

Sizes and names only, so that memory can be planned without tensors. The disk tier writes records as they are, so `layout_id` names
everything that gives their bytes a meaning: fields, widths, dtypes, ratios, block size, byte order.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from math import prod

from whalefall.core.cache_spec import DTYPE_BYTES, CacheSpec

ALIGN_BYTES = 64
"""Fields of a record start at multiples of this, so that each is copied in whole cache lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSpan:
    """Where one field lies in a record."""

    name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordLayout:
    spans: tuple[FieldSpan, ...]
    """In layer order: the first layers' entries arrive first."""
    record_bytes: int
    layout_id: bytes
    """16 bytes; equal only where records mean the same."""

    @classmethod
    def of(cls, spec: CacheSpec, *, with_snapshots: bool = False, tag: str = "") -> RecordLayout:
        """
        Args:
            with_snapshots: the fixed state at the block's end is part of the record, behind the growing fields.
            tag: whatever else must be equal for records to be exchanged.
        """
        sizes = {f.name: spec.block_tokens // f.tokens_per_entry * f.width * DTYPE_BYTES[f.dtype] for f in spec.growing}
        if with_snapshots:
            sizes |= {f.name: f.rows * f.width * DTYPE_BYTES[f.dtype] for f in spec.rings}
            sizes |= {f.name: prod(f.shape) * DTYPE_BYTES[f.dtype] for f in spec.states}
        spans, offset = [], 0
        for name, num_bytes in sizes.items():
            spans.append(FieldSpan(name=name, offset=offset, num_bytes=num_bytes))
            offset += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        text = repr((1, sys.byteorder, ALIGN_BYTES, spec, with_snapshots, tag))
        return cls(spans=tuple(spans), record_bytes=offset, layout_id=hashlib.blake2b(text.encode(), digest_size=16).digest())
