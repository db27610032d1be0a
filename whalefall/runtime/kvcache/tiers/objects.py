# SPDX-License-Identifier: Apache-2.0
"""Blocks in an object store: anything fsspec reaches (`s3://bucket/prefix`, `gs://`, `memory://`). Needs the extra `objectstore`.

The same records as on a disk, one object per block. An object appears whole or not at all. Making room is the bucket's own work (its
lifecycle rules): listing a bucket to find what is old would cost more than the blocks are worth.
"""

from __future__ import annotations

from typing import Any

from whalefall.core.errors import ConfigError
from whalefall.observe.log import get_logger
from whalefall.runtime.kvcache.tiers.store import HEADER_BYTES, StoreCounts, find_flaw, make_header

log = get_logger(__name__)


class BlockObjects:
    """A BlockStore behind a URL."""

    def __init__(self, url: str, layout_id: bytes, *, options: dict[str, Any] | None = None) -> None:
        """
        Args:
            options: for the file system, as fsspec takes them (endpoint, credentials); most stores find theirs in the environment.
        Raises:
            ConfigError: no library for this kind of URL is installed.
        """
        self.counts = StoreCounts()
        self.max_bytes = 0
        self._layout_id = layout_id
        self._fs, root = _open(url, options or {})
        self._home = f"{root.rstrip('/')}/{layout_id.hex()}"

    def look(self) -> None:
        """Listing a bucket is slow and costs money: nobody looks."""

    def has(self, key: bytes) -> bool:
        return bool(self._fs.exists(self._path(key)))

    def read(self, key: bytes, record: memoryview) -> bool:
        path = self._path(key)
        try:
            stored = memoryview(self._fs.cat_file(path))
        except FileNotFoundError:
            return False
        flaw = self._take(stored, key, record)
        if flaw is not None:
            self.counts.num_damaged += 1
            log.warning("%s: %s; removed, the block is computed again", path, flaw)
            self._fs.rm_file(path)
            return False
        self.counts.num_read += 1
        return True

    def write(self, key: bytes, record: memoryview) -> None:
        path = self._path(key)
        if self._fs.exists(path):
            return
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)  # a file system behind fsspec wants it, a bucket takes it as done
        self._fs.pipe_file(path, b"".join((make_header(self._layout_id, key, record), record)))
        self.counts.num_written += 1

    def remove(self, key: bytes) -> None:
        path = self._path(key)
        if self._fs.exists(path):
            self._fs.rm_file(path)

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._home}/{name[:2]}/{name}.kv"

    def _take(self, stored: memoryview, key: bytes, record: memoryview) -> str | None:
        if len(stored) != HEADER_BYTES + record.nbytes:
            return "it has the wrong length"
        record[:] = stored[HEADER_BYTES:]
        return find_flaw(stored[:HEADER_BYTES], self._layout_id, key, record)


def _open(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    kind = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs

        file_system, root = url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"disk_cache_dir is {url!r}, but nothing here reaches {kind}:// ({error}): pip install 'whalefall[objectstore]' "
            f"and fsspec's library for {kind}"
        ) from error
    return file_system, root
