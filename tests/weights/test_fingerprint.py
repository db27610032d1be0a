# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's name changes with anything that its answers depend on, and not with where it lies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from whalefall.testing.toy_checkpoint import write_toy_checkpoint
from whalefall.weights.fingerprint import fingerprint


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
