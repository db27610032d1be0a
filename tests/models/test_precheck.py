# SPDX-License-Identifier: Apache-2.0
"""Claims about the early check: it sees what the loader would see, and does not wait for torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from whalefall.core.errors import ConfigError
from whalefall.models.precheck import precheck
from whalefall.testing.checkpoint import TINY_CONFIG, write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, TINY_CONFIG)


def test_whole_checkpoint_passes(folder: Path) -> None:
    precheck(folder)


def test_faulty_config_and_faulty_shard_are_named(folder: Path) -> None:
    with (folder / "model-00001-of-00002.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ConfigError, match="1 bytes of no tensor at its end"):
        precheck(folder)
    (folder / "config.json").write_text(json.dumps({**TINY_CONFIG, "eos_token_id": None}))
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id: found null, allowed: an integer of at least 0"):
        precheck(folder)


def test_verdict_does_not_need_torch(folder: Path) -> None:
    code = f"""
import sys
from whalefall.models.precheck import precheck
precheck({str(folder)!r})
assert "torch" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
