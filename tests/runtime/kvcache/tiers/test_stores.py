# SPDX-License-Identifier: Apache-2.0
"""The bottom tier gives back what it was given, or nothing: whatever happens to its files."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from whalefall.core.errors import ConfigError
from whalefall.runtime.kvcache.tiers.disk import BlockFiles
from whalefall.runtime.kvcache.tiers.objects import BlockObjects
from whalefall.runtime.kvcache.tiers.store import HEADER_BYTES, BlockStore

LAYOUT, OTHER_LAYOUT = bytes(range(16)), bytes(range(1, 17))
RECORD_BYTES = 1_000


def key_of(n: int) -> bytes:
    return n.to_bytes(16, "big")


def record_of(n: int) -> memoryview:
    return memoryview(bytearray((n + i) % 256 for i in range(RECORD_BYTES)))


def blank() -> memoryview:
    return memoryview(bytearray(RECORD_BYTES))


def files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())


@pytest.fixture(params=["disk", "file://", "memory://"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlockStore:
    if request.param == "disk":
        return BlockFiles(tmp_path, LAYOUT, max_bytes=10**9)
    pytest.importorskip("fsspec")
    return BlockObjects(f"{request.param}{tmp_path}/blocks", LAYOUT)


def test_a_record_comes_back_as_it_was_and_unknown_keys_are_misses(store: BlockStore) -> None:
    for n in (1, 2):
        store.write(key_of(n), record_of(n))
    store.write(key_of(1), record_of(1))
    record = blank()
    assert store.has(key_of(2)) and store.read(key_of(2), record) and record == record_of(2)
    assert store.read(key_of(1), record) and record == record_of(1)
    assert not store.has(key_of(3)) and not store.read(key_of(3), record)
    assert (store.counts.num_written, store.counts.num_read, store.counts.num_damaged) == (2, 2, 0)


def test_a_removed_record_is_a_miss(store: BlockStore) -> None:
    store.write(key_of(1), record_of(1))
    store.remove(key_of(1))
    store.remove(key_of(1))
    assert not store.has(key_of(1)) and not store.read(key_of(1), blank())


def test_records_survive_a_restart_and_are_seen_by_others_at_once(tmp_path: Path) -> None:
    first, second = (BlockFiles(tmp_path, LAYOUT, max_bytes=10**9) for _ in range(2))
    first.write(key_of(1), record_of(1))
    record = blank()
    assert second.read(key_of(1), record) and record == record_of(1)


def test_another_layout_never_hits(tmp_path: Path) -> None:
    BlockFiles(tmp_path, LAYOUT, max_bytes=10**9).write(key_of(1), record_of(1))
    assert not BlockFiles(tmp_path, OTHER_LAYOUT, max_bytes=10**9).read(key_of(1), blank())


def cut_short(file: Path) -> None:
    os.truncate(file, RECORD_BYTES // 2)


def cut_in_header(file: Path) -> None:
    os.truncate(file, HEADER_BYTES // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[HEADER_BYTES + 17] ^= 4
    file.write_bytes(content)


def wrong_magic(file: Path) -> None:
    file.write_bytes(b"notours!" + file.read_bytes()[8:])


def other_layout(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:8] + OTHER_LAYOUT + content[24:])


def other_key(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:24] + key_of(99) + content[40:])


def too_long(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


DAMAGES = [cut_short, cut_in_header, empty, flip_a_bit, wrong_magic, other_layout, other_key, too_long]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["disk", "file://"])
def test_a_damaged_record_is_a_miss_with_one_log_line_and_can_be_written_again(
    damage: object, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "disk":
        store: BlockStore = BlockFiles(tmp_path, LAYOUT, max_bytes=10**9)
    else:
        pytest.importorskip("fsspec")
        store = BlockObjects(f"file://{tmp_path}", LAYOUT)
    store.write(key_of(1), record_of(1))
    (file,) = files(tmp_path)
    assert callable(damage)
    damage(file)

    with caplog.at_level(logging.INFO, logger="whalefall"):
        assert not store.read(key_of(1), blank())
    assert len(caplog.records) == 1 and file.name in caplog.records[0].getMessage()
    assert not store.has(key_of(1)) and store.counts.num_damaged == 1
    store.write(key_of(1), record_of(1))
    record = blank()
    assert store.read(key_of(1), record) and record == record_of(1)


def test_the_longest_unused_makes_room_and_the_cap_holds(tmp_path: Path) -> None:
    size = RECORD_BYTES + HEADER_BYTES
    store = BlockFiles(tmp_path, LAYOUT, max_bytes=10 * size)
    for n in range(10):
        store.write(key_of(n), record_of(n))
        os.utime(_file_of(tmp_path, n), (1_000 + n, 1_000 + n))
    assert store.read(key_of(0), blank())  # used just now
    for n in range(10, 30):
        store.write(key_of(n), record_of(n))
        assert sum(f.stat().st_size for f in files(tmp_path)) <= 10 * size
    assert not store.has(key_of(1)) and store.has(key_of(29)) and store.counts.num_evicted >= 20


def test_a_used_record_outlives_unused_ones(tmp_path: Path) -> None:
    size = RECORD_BYTES + HEADER_BYTES
    store = BlockFiles(tmp_path, LAYOUT, max_bytes=10 * size)
    for n in range(10):
        store.write(key_of(n), record_of(n))
        os.utime(_file_of(tmp_path, n), (1_000 + n, 1_000 + n))
    assert store.read(key_of(0), blank())
    store.write(key_of(10), record_of(10))
    assert store.has(key_of(0)) and not store.has(key_of(1))


def test_engines_that_share_a_directory_stay_near_its_cap(tmp_path: Path) -> None:
    size, cap = RECORD_BYTES + HEADER_BYTES, 64
    stores = [BlockFiles(tmp_path, layout, max_bytes=cap * size) for layout in (LAYOUT, OTHER_LAYOUT)]
    for n in range(300):
        stores[n % 2].write(key_of(n), record_of(n))
        assert len(files(tmp_path)) <= cap + 2 * cap // 16 + 2


def test_foreign_files_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    foreign = [tmp_path / "notes.txt", tmp_path / LAYOUT.hex() / "00" / "mine.kv"]
    size = RECORD_BYTES + HEADER_BYTES
    store = BlockFiles(tmp_path, LAYOUT, max_bytes=2 * size)
    for file in foreign:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 10 * size)
    for n in range(6):
        store.write(key_of(n), record_of(n))
    assert all(file.exists() for file in foreign) and store.has(key_of(5))


def test_temporary_files_of_a_killed_writer_are_swept_and_fresh_ones_left(tmp_path: Path) -> None:
    store = BlockFiles(tmp_path, LAYOUT, max_bytes=10**9)
    folder = tmp_path / LAYOUT.hex() / "00"
    folder.mkdir(parents=True)
    old, fresh = (folder / f".{key_of(n).hex()}.77.{n}.tmp" for n in (1, 2))
    for file in (old, fresh):
        file.write_bytes(b"half")
    os.utime(old, (time.time() - 86_400,) * 2)
    store.write(key_of(3), record_of(3))
    assert not old.exists() and fresh.exists()


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlockFiles(tmp_path, LAYOUT, max_bytes=10**9)

    def no_space(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", no_space)
    with pytest.raises(OSError, match="No space"):
        store.write(key_of(1), record_of(1))
    assert files(tmp_path) == []


def test_a_record_is_never_seen_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlockFiles(tmp_path, LAYOUT, max_bytes=10**9)
    seen = []
    rename = os.rename

    def look_then_rename(source: str, target: str) -> None:
        seen.append((store.has(key_of(1)), store.read(key_of(1), blank())))
        rename(source, target)

    monkeypatch.setattr(os, "rename", look_then_rename)
    store.write(key_of(1), record_of(1))
    assert seen == [(False, False)] and store.counts.num_damaged == 0 and store.has(key_of(1))


def test_a_directory_that_cannot_be_made_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        BlockFiles(tmp_path / "file" / "cache", LAYOUT, max_bytes=10**9)


def test_a_url_that_nothing_reaches_names_the_extra() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigError, match=r"whalefall\[objectstore\]"):
        BlockObjects("nosuchkind://bucket/prefix", LAYOUT)


def _file_of(root: Path, n: int) -> Path:
    name = key_of(n).hex()
    return root / LAYOUT.hex() / name[:2] / f"{name}.kv"


def test_a_look_counts_what_others_wrote(tmp_path: Path) -> None:
    BlockFiles(tmp_path, LAYOUT, max_bytes=10**9).write(key_of(1), record_of(1))
    store = BlockFiles(tmp_path, OTHER_LAYOUT, max_bytes=10**9)
    store.look()
    assert store.counts.used_bytes == RECORD_BYTES + HEADER_BYTES
