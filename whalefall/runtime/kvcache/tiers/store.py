# SPDX-License-Identifier: Apache-2.0
"""BlockStore: what the bottom tier must offer, and the header that makes each stored record prove itself.

A store holds records by key, for ever or until it makes room. It may be shared, emptied and damaged by others at any time: `read` answers
only with a record that is whole and meant for this engine, everything else is a miss.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Protocol

_HEADER = struct.Struct("<8s16s16sQI12x")
HEADER_BYTES = _HEADER.size
"""magic, layout id, key, record bytes, CRC-32 of the record, zeros"""
MAGIC = b"WHALEKV1"


class BlockStore(Protocol):
    """Calls come from two threads: one writes and removes, one reads."""

    counts: StoreCounts
    max_bytes: int
    """Its cap; 0 for none."""

    def look(self) -> None:
        """Find out how much is there already. Called once, first, by the writing thread."""
        ...

    def has(self, key: bytes) -> bool: ...

    def read(self, key: bytes, record: memoryview) -> bool:
        """Fill `record` and answer True; or answer False: not there, or not whole. On False the bytes of `record` mean nothing."""
        ...

    def write(self, key: bytes, record: memoryview) -> None:
        """Keep a record; no harm if it is there already.

        Raises:
            OSError: it cannot be kept (no space, no permission, no connection).
        """
        ...

    def remove(self, key: bytes) -> None:
        """Keep it no longer; unknown keys are passed over."""
        ...


@dataclass(slots=True)
class StoreCounts:
    num_read: int = 0
    """Records that were read whole."""
    num_written: int = 0
    num_damaged: int = 0
    """Records found truncated, corrupt or foreign, and removed."""
    num_evicted: int = 0
    used_bytes: int = 0
    """At the last look, with what was written since; 0 where nobody looks."""


def make_header(layout_id: bytes, key: bytes, record: memoryview) -> bytes:
    return _HEADER.pack(MAGIC, layout_id, key, record.nbytes, zlib.crc32(record))


def find_flaw(header: bytes | bytearray | memoryview, layout_id: bytes, key: bytes, record: memoryview) -> str | None:
    """Why a stored record must not be used, in a few words; None when it is whole and the right one."""
    if len(header) < HEADER_BYTES:
        return "its header is cut short"
    magic, its_layout, its_key, num_bytes, checksum = _HEADER.unpack(header)
    if magic != MAGIC:
        return "it is no block file"
    if its_layout != layout_id or num_bytes != record.nbytes:
        return "it has another layout"
    if its_key != key:
        return "it holds another block"
    return None if zlib.crc32(record) == checksum else "its checksum is wrong"
