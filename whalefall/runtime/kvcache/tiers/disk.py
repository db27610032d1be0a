# SPDX-License-Identifier: Apache-2.0
"""The disk tier: one immutable file per block, named by its key. Survives restarts; several engines may share the directory.

    ROOT/<layout id>/<first byte of the key>/<key>.kv       header (store.py), record

No locks: a file appears whole, by rename, and never changes; whoever finds it gone has a miss. Modification times say when a file was
last used, for all engines alike. Nothing is forced to the platter: a file that a power cut left half written fails its checksum.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from whalefall.observe.log import get_logger
from whalefall.runtime.kvcache.tiers.store import HEADER_BYTES, StoreCounts, find_flaw, make_header

log = get_logger(__name__)
LOOKS_PER_FILL = 16
"""The directory is looked through again each time this share of the cap was written here: n engines that share it exceed the cap by less
than n/16 of it."""
TRIM_TO = 0.9
"""When over its cap, the tier is trimmed to this share of it, so that not every write evicts."""
STALE_TEMP_S = 3600.0
"""A temporary file this old has lost its writer."""
_OURS = re.compile(r"[0-9a-f]{32}\.kv")
_TEMP = re.compile(r"\.[0-9a-f]{32}\..*\.tmp")


class BlockFiles:
    """A BlockStore in a directory."""

    def __init__(self, root: Path, layout_id: bytes, *, max_bytes: int) -> None:
        """
        Raises:
            OSError: the directory cannot be made or written to.
        """
        self.counts = StoreCounts()
        self._root = root
        self._home = root / layout_id.hex()
        self._layout_id = layout_id
        self.max_bytes = max_bytes
        self._look_at_bytes = 0
        """Look through the directory when used_bytes has grown to this; 0 makes the first write look."""
        self._serial = itertools.count()
        self._home.mkdir(parents=True, exist_ok=True)
        if not os.access(self._home, os.W_OK | os.X_OK):
            raise PermissionError(f"{self._home}: not writable")

    def look(self) -> None:
        self._make_room(0)

    def has(self, key: bytes) -> bool:
        return os.path.exists(self._path(key))

    def read(self, key: bytes, record: memoryview) -> bool:
        path = self._path(key)
        try:
            flaw = self._read_file(path, key, record)
        except FileNotFoundError:
            return False
        if flaw is not None:
            self.counts.num_damaged += 1
            log.warning("%s: %s; removed, the block is computed again", path, flaw)
            _remove(path)
            return False
        self.counts.num_read += 1
        _touch(path)
        return True

    def write(self, key: bytes, record: memoryview) -> None:
        path = self._path(key)
        if _touch(path):
            return  # this engine or another has written it before
        num_bytes = HEADER_BYTES + record.nbytes
        if self.counts.used_bytes + num_bytes > self._look_at_bytes:
            self._make_room(num_bytes)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temp = os.path.join(os.path.dirname(path), f".{key.hex()}.{os.getpid()}.{next(self._serial)}.tmp")
        try:
            _write_file(temp, make_header(self._layout_id, key, record), record)
            os.rename(temp, path)
        except BaseException:
            _remove(temp)
            raise
        self.counts.num_written += 1
        self.counts.used_bytes += num_bytes

    def remove(self, key: bytes) -> None:
        _remove(self._path(key))

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._home}/{name[:2]}/{name}.kv"

    def _read_file(self, path: str, key: bytes, record: memoryview) -> str | None:
        """Straight into `record`; the flaw, if there is one."""
        header = bytearray(HEADER_BYTES)
        with open(path, "rb", buffering=0) as file:
            num_header = file.readinto(header)
            num_record = _read_fully(file.fileno(), record)
            if num_header < HEADER_BYTES or num_record < record.nbytes:
                return "it is cut short"
            if file.read(1):
                return "it is too long"
        return find_flaw(header, self._layout_id, key, record)

    def _make_room(self, num_bytes: int) -> None:
        """Look through the whole directory, every layout's part of it; remove what was not used for longest when it is over its cap."""
        files = sorted(self._scan())
        used = sum(file.num_bytes for file in files)
        if used + num_bytes > self.max_bytes:
            for file in files:
                if used + num_bytes <= TRIM_TO * self.max_bytes:
                    break
                used -= file.num_bytes
                self.counts.num_evicted += _remove(file.path)
        self.counts.used_bytes = used
        self._look_at_bytes = min(self.max_bytes, max(used + num_bytes, used + self.max_bytes // LOOKS_PER_FILL))

    def _scan(self) -> Iterator[_Found]:
        """Our block files; on the way, temporary files without a writer are removed. Anything else in the directory is not ours."""
        for folder, _, names in os.walk(self._root):
            for name in names:
                is_temp = _TEMP.fullmatch(name) is not None
                if not is_temp and not _OURS.fullmatch(name):
                    continue
                path = os.path.join(folder, name)
                try:
                    stat = os.stat(path)
                except FileNotFoundError:
                    continue  # another engine makes room too
                if not is_temp:
                    yield _Found(stat.st_mtime, stat.st_size, path)
                elif time.time() - stat.st_mtime > STALE_TEMP_S:
                    _remove(path)


class _Found(NamedTuple):
    used_s: float
    num_bytes: int
    path: str


def _write_file(path: str, header: bytes, record: memoryview) -> None:
    with open(path, "xb", buffering=0) as file:
        for part in (memoryview(header), record):
            done = 0
            while done < part.nbytes:
                done += file.write(part[done:])


def _read_fully(fd: int, into: memoryview) -> int:
    done = 0
    while done < into.nbytes:
        count = os.readv(fd, [into[done:]])
        if count == 0:
            break
        done += count
    return done


def _touch(path: str) -> bool:
    """Mark a file as just used; whether it is there."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except PermissionError:
        return os.path.exists(path)  # another user's file: readable, and its owner keeps the time
    return True


def _remove(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False  # gone already, or not ours to remove: it will be found again
    return True
