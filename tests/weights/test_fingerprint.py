# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's name changes with anything that its answers depend on, and not with where it lies."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from whalefall.testing.toy_checkpoint import write_toy_checkpoint
from whalefall.weights import fingerprint as naming
from whalefall.weights.fingerprint import content_fingerprint, fingerprint


def test_copy_has_the_same_name_and_other_weights_another(tmp_path: Path) -> None:
    first = write_toy_checkpoint(tmp_path / "a")
    copy = Path(shutil.copytree(first, tmp_path / "b"))
    other = write_toy_checkpoint(tmp_path / "c", seed=1)

    assert fingerprint(first) == fingerprint(copy) != fingerprint(other)


def test_changed_config_and_changed_tail_of_a_file_change_the_name(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path)
    names = {fingerprint(folder)}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    names.add(fingerprint(folder))
    shard = next(folder.glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    names.add(fingerprint(folder))

    assert len(names) == 3


def one_shard(folder: Path, size: int = 200_000) -> Path:
    """A checkpoint of one tensor of zeros, so large that samples leave gaps."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    shard = folder / "model.safetensors"
    shard.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    return shard


def flip_byte(shard: Path, at: int) -> None:
    """In place, with the modification time set back, as a careless tool may do."""
    before = shard.stat()
    with shard.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_byte_between_the_samples_changes_the_name_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a memo; the name by samples does not see it, which is why nothing outlives the process under that one."""
    monkeypatch.setattr(naming, "SETTLED_S", -1.0)
    monkeypatch.setattr(naming, "PIECE_BYTES", 70_000)
    shard, memo = one_shard(tmp_path / "model"), tmp_path / "memo"
    before = [fingerprint(shard.parent), content_fingerprint(shard.parent), content_fingerprint(shard.parent, memo)]
    flip_byte(shard, 101_000)
    after = [fingerprint(shard.parent), content_fingerprint(shard.parent), content_fingerprint(shard.parent, memo)]

    assert before[1] == before[2] and after[1] == after[2]
    assert before[0] == after[0] and before[1] != after[1]
    assert len(list(memo.iterdir())) == 2


def test_every_piece_counts_and_copies_have_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naming, "PIECE_BYTES", 70_000)
    monkeypatch.setattr(naming, "CHUNK_BYTES", 30_000)
    shard = one_shard(tmp_path / "model")
    copy = Path(shutil.copytree(shard.parent, tmp_path / "copy"))
    names = [content_fingerprint(shard.parent)]
    assert content_fingerprint(copy) == names[0]
    for at in (29_999, 70_000, 140_001, shard.stat().st_size - 1):
        flip_byte(shard, at)
        names.append(content_fingerprint(shard.parent))
    assert len(set(names)) == 5


def test_the_memo_spares_the_reading_and_is_no_condition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naming, "SETTLED_S", -1.0)
    shard, memo = one_shard(tmp_path / "model"), tmp_path / "memo"
    name = content_fingerprint(shard.parent, memo)
    (tmp_path / "file").touch()
    assert content_fingerprint(shard.parent, tmp_path / "file" / "no directory") == name
    for kept in memo.iterdir():
        assert len(kept.read_text()) == 64
    with monkeypatch.context() as patched:
        patched.setattr(naming, "_hash_piece", None)  # whoever reads now fails
        assert content_fingerprint(shard.parent, memo) == name
    next(memo.iterdir()).write_text("cut short")
    assert content_fingerprint(shard.parent, memo) == name


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path) -> None:
    shard, memo = one_shard(tmp_path / "model"), tmp_path / "memo"
    content_fingerprint(shard.parent, memo)
    assert not memo.exists()
