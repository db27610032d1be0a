# SPDX-License-Identifier: Apache-2.0
"""inspect_model: all that can be said about a model directory without reading its weights.

Unlike opening a model to run it, a fault does not end the look: what can be read is reported, and what cannot is in `problems`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whalefall.core.errors import ConfigError
from whalefall.core.seams import LocalComm
from whalefall.models.definition import BuildContext, ModelConfig, ModelDefinition
from whalefall.models.registry import CONFIG_FILE, find_definition, read_config
from whalefall.weights.check import find_problems
from whalefall.weights.inspect import TensorGroup, group_by_format, group_by_kind
from whalefall.weights.loader import IgnoredTensors, count_ignored
from whalefall.weights.safetensors import ShardSet

_BLOCK_TOKENS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheCost:
    """What requests cost when caches are kept in this dtype."""

    dtype: str
    bytes_per_token: float
    """Growing part, per token of context."""
    bytes_per_request: int
    """Fixed part: window rings, their tags, pending groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelReport:
    model_dir: Path
    family: str | None
    """Name of the model family, None when it is unknown."""
    config: dict[str, Any]
    """Fields and derived facts of the parsed config; empty when it cannot be read."""
    num_shards: int
    num_tensors: int
    num_bytes: int
    num_parameters: int
    kinds: tuple[TensorGroup, ...]
    formats: tuple[TensorGroup, ...]
    ignored: tuple[IgnoredTensors, ...]
    caches: tuple[CacheCost, ...]
    problems: tuple[str, ...]
    """Empty: the checkpoint can be loaded."""

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        values = dataclasses.asdict(self)
        values["model_dir"] = str(self.model_dir)
        return values


def inspect_model(model_dir: str | Path) -> ModelReport:
    """Read config.json and the shard headers."""
    folder = Path(model_dir)
    problems: list[str] = []
    definition, config = _read_model(folder, problems)
    shards = ShardSet.open(folder)
    ignored: tuple[IgnoredTensors, ...] = ()
    if definition is None or config is None:
        problems += shards.problems
    else:
        wanted = definition.weight_map(config)
        problems += find_problems(shards, wanted)
        ignored = count_ignored(shards, wanted)
    if not (folder / "tokenizer.json").is_file():
        problems.append(f"{folder / 'tokenizer.json'}: missing, allowed: the model's tokenizer")
    tensors = list(shards.all_tensors())
    kinds = group_by_kind(tensors)
    return ModelReport(
        model_dir=folder,
        family=definition.name if definition else None,
        config=_facts(config),
        num_shards=len(shards.shards),
        num_tensors=len(tensors),
        num_bytes=shards.num_bytes,
        num_parameters=sum(group.num_parameters for group in kinds),
        kinds=kinds,
        formats=group_by_format(tensors),
        ignored=ignored,
        caches=_cache_costs(definition, config, folder) if definition and config else (),
        problems=tuple(problems),
    )


def _read_model(folder: Path, problems: list[str]) -> tuple[ModelDefinition | None, ModelConfig | None]:
    definition = None
    try:
        values = read_config(folder)
        definition = find_definition(values, CONFIG_FILE)
        return definition, definition.parse_config(values, CONFIG_FILE)
    except ConfigError as error:
        problems += error.problems
        return definition, None


def _facts(config: ModelConfig | None) -> dict[str, Any]:
    """Every field, then every derived property, of a config dataclass."""
    if config is None:
        return {}
    fields = dataclasses.asdict(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else dict(vars(config))
    derived = [name for name, member in vars(type(config)).items() if isinstance(member, property)]
    return fields | {name: getattr(config, name) for name in derived}


def _cache_costs(definition: ModelDefinition, config: ModelConfig, folder: Path) -> tuple[CacheCost, ...]:
    costs = []
    for dtype in (torch.bfloat16, torch.float32):
        context = BuildContext(
            dtype=dtype, device=torch.device("cpu"), weights="packed", kv_cache_dtype="unrounded", comm=LocalComm(), model_dir=folder
        )
        spec = definition.cache_spec(config, context, _BLOCK_TOKENS)
        name = str(dtype).removeprefix("torch.")
        costs.append(CacheCost(dtype=name, bytes_per_token=spec.block_bytes / spec.block_tokens, bytes_per_request=spec.slot_bytes))
    return tuple(costs)
