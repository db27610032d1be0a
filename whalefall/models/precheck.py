# SPDX-License-Identifier: Apache-2.0
"""precheck: is this folder a checkpoint that we can load? Answered from config.json and shard headers, before torch is imported.

The engine asks the same questions again when it opens the model; asking early means that a wrong key or a truncated shard is an answer
within a second, not after the start of everything else.
"""

from __future__ import annotations

from pathlib import Path

from whalefall.models.registry import CONFIG_FILE, find_definition, read_config
from whalefall.weights.check import check_checkpoint
from whalefall.weights.safetensors import ShardSet


def precheck(model_dir: str | Path, *, has_shards: bool = True) -> None:
    """
    Args:
        has_shards: whether the weights will be read from the folder too.
    Raises:
        ConfigError: with every problem of the config, or else every problem of the shards.
    """
    folder = Path(model_dir)
    file = str(folder / CONFIG_FILE)
    values = read_config(folder)
    definition = find_definition(values, file)
    config = definition.parse_config(values, file)
    if has_shards:
        check_checkpoint(ShardSet.open(folder), definition.weight_map(config))
