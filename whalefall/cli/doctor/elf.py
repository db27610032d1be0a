# SPDX-License-Identifier: Apache-2.0
"""A small ELF reader: the name a shared library gives itself and the libraries it asks the loader for.

Reads the program headers and the dynamic section of 64-bit little-endian files, a few hundred bytes each, and never loads the library.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_SONAME = 0, 1, 5, 14
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_MAX_DYNAMIC_BYTES = 1 << 20
"""A dynamic section is a few kilobytes; a larger claim means a damaged file."""


@dataclass(frozen=True, slots=True)
class Linkage:
    soname: str | None
    needed: tuple[str, ...]
    """DT_NEEDED entries in file order, e.g. "libcudart.so.12"."""


def read_linkage(path: Path) -> Linkage | None:
    """The linkage of a shared library, or None when the file is not a readable 64-bit ELF object with a dynamic section."""
    try:
        with path.open("rb") as file:
            return _read(file)
    except (OSError, struct.error, ValueError, IndexError):
        return None


def _read(file: BinaryIO) -> Linkage | None:
    raw = file.read(_HEADER.size)
    if len(raw) < _HEADER.size or raw[:6] != b"\x7fELF\x02\x01":
        return None
    header = _HEADER.unpack(raw)
    program_offset, entry_bytes, num_entries = header[5], header[9], header[10]
    file.seek(program_offset)
    table = file.read(entry_bytes * num_entries)
    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] | None = None
    for i in range(num_entries):
        kind, _, offset, address, _, file_bytes, _, _ = _PROGRAM_HEADER.unpack_from(table, i * entry_bytes)
        if kind == _PT_LOAD:
            loads.append((address, offset, file_bytes))
        elif kind == _PT_DYNAMIC:
            dynamic = (offset, file_bytes)
    if dynamic is None or dynamic[1] > _MAX_DYNAMIC_BYTES:
        return None
    file.seek(dynamic[0])
    return _read_dynamic(file, file.read(dynamic[1]), loads)


def _read_dynamic(file: BinaryIO, section: bytes, loads: list[tuple[int, int, int]]) -> Linkage | None:
    needed_at: list[int] = []
    soname_at: int | None = None
    strings_address: int | None = None
    for tag, value in struct.iter_unpack("<qQ", section[: len(section) // 16 * 16]):
        if tag == _DT_NULL:
            break
        if tag == _DT_NEEDED:
            needed_at.append(value)
        elif tag == _DT_SONAME:
            soname_at = value
        elif tag == _DT_STRTAB:
            strings_address = value
    if strings_address is None:
        return None
    # DT_STRTAB is an address; the segment that maps it says where its bytes lie in the file.
    base = next((off + strings_address - addr for addr, off, size in loads if addr <= strings_address < addr + size), None)
    if base is None:
        return None
    return Linkage(
        soname=None if soname_at is None else _string_at(file, base + soname_at),
        needed=tuple(_string_at(file, base + at) for at in needed_at),
    )


def _string_at(file: BinaryIO, offset: int) -> str:
    file.seek(offset)
    raw = file.read(256)
    return raw[: raw.index(b"\0")].decode("ascii", "replace")
