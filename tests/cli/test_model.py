# SPDX-License-Identifier: Apache-2.0
"""Claims about `whalefall model inspect`: what it says, in which form, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whalefall.cli.model import app
from whalefall.testing.checkpoint import TINY_CONFIG, write_checkpoint
from whalefall.weights.mapped import MappedShard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), TINY_CONFIG)


def test_whole_checkpoint_is_described(folder: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(folder)])
    assert result.exit_code == 0, result.output
    for words in ("deepseek_v41", "780 tensors", "routed experts", "engram tables", "FP4 + scales", "speculation is off", "no problems"):
        assert words in result.output


def test_json_holds_every_fact(folder: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(folder), "--json"])
    found = json.loads(result.output)
    assert (found["family"], found["num_tensors"], found["problems"]) == ("deepseek_v41", 780, [])
    assert found["config"]["num_encoder_layers"] == 4
    assert {kind["name"] for kind in found["kinds"]} == {"global", "layers", "routed experts", "engram tables", "draft"}
    caches = {cache["dtype"]: cache for cache in found["caches"]}
    # Two sources at one entry per two tokens and one per token: 2 entries of 64 + 32 values.
    assert caches["bfloat16"]["bytes_per_token"] == 2 * 96 * 2
    assert caches["float32"]["bytes_per_token"] == 2 * 96 * 4


def test_weights_are_never_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MappedShard, "__init__", lambda *_: pytest.fail("a shard was mapped"))
    assert CliRunner().invoke(app, ["inspect", str(folder)]).exit_code == 0


def test_faulty_checkpoint_is_described_as_far_as_it_goes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY_CONFIG)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    (tmp_path / "tokenizer.json").unlink()
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 1
    assert "problem: model-00001-of-00002.safetensors: missing" in result.output
    assert "tokenizer.json: missing" in result.output and "routed experts" in result.output


def test_unknown_family_still_shows_the_tensors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY_CONFIG)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 1
    assert "unknown model family" in result.output and "780 tensors" in result.output and "DeepseekV41ForCausalLM" in result.output


def test_folder_that_is_not_there_is_a_line_not_a_trace(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert "no such folder" in result.output and "Traceback" not in result.output
