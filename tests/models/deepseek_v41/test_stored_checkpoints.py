# SPDX-License-Identifier: Apache-2.0
"""Claims about checkpoints that others wrote: config, tensors and tokenizer are understood as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.deepseek_v41.engram_tables import compressed_vocab
from whalefall.models.deepseek_v41.weights import draft_parameters, parameters, stored_tensors, weight_map
from whalefall.models.registry import read_config
from whalefall.weights.check import find_problems
from whalefall.weights.safetensors import ShardSet

ROOT = Path(__file__).parents[3]
COPIED = ROOT / "tests" / "goldens"
SHARED = ROOT.parent / "shared"


def stored_folders() -> list[Path]:
    """The copy inside the repository, and the whole collection where the machine has it."""
    found = {path.parent.name: path.parent for base in (COPIED, SHARED / "goldens") for path in base.glob("v41-*/config.json")}
    return [found[name] for name in sorted(found)]


def by_name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("folder", stored_folders(), ids=by_name)
def test_stored_checkpoint_has_no_problems(folder: Path) -> None:
    config = DeepseekV41Config.from_hf(read_config(folder))
    shards = ShardSet.open(folder)
    assert find_problems(shards, weight_map(config)) == []
    draft = stored_tensors(draft_parameters(config), config.is_quantised)
    assert {t.name for t in shards.all_tensors()} == {*stored_tensors(parameters(config), config.is_quantised), *draft}
    assert {t.name: t.shape for t in shards.all_tensors() if t.name in draft} == {name: spec.shape for name, spec in draft.items()}


@pytest.mark.parametrize("folder", stored_folders(), ids=by_name)
def test_compressed_vocabulary_has_the_size_that_the_config_says(folder: Path) -> None:
    config = DeepseekV41Config.from_hf(read_config(folder))
    made = compressed_vocab(folder / "tokenizer.json", config.vocab_size)
    assert made.count == config.engram_compressed_vocab_size


@pytest.mark.parametrize("file", sorted((SHARED / "bench").glob("v41-cut/config*.json")), ids=by_name)
def test_cut_down_release_is_understood(file: Path) -> None:
    config = DeepseekV41Config.from_hf(json.loads(file.read_text()), str(file))
    assert (config.num_hidden_layers, config.num_encoder_layers, config.hidden_size) == (12, 6, 5120)
    assert config.defaults_used == ()
