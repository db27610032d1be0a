# SPDX-License-Identifier: Apache-2.0
"""Does a checkpoint hold what the model expects? Answered from the headers, before any data is read.

Every difference becomes one line with tensor, shard, expected and found. A tensor is either in the weight map, or named by an ignore
rule, or a problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from whalefall.core.errors import ConfigError
from whalefall.weights.safetensors import INDEX_FILE, ShardSet, StoredTensor
from whalefall.weights.spec import TensorSpec, WeightMap


def check_checkpoint(shards: ShardSet, weight_map: WeightMap) -> None:
    """
    Raises:
        ConfigError: with every problem of files and tensors.
    """
    problems = find_problems(shards, weight_map)
    if problems:
        raise ConfigError(problems)


def find_problems(shards: ShardSet, weight_map: WeightMap) -> list[str]:
    """File problems first, then tensors in the order of the weight map, then what is too much."""
    found: dict[str, StoredTensor] = {}
    repeated: list[str] = []
    for tensor in shards.all_tensors():
        first = found.setdefault(tensor.name, tensor)
        if first is not tensor:
            both = first.shard if first.shard == tensor.shard else f"{first.shard} and {tensor.shard}"
            repeated.append(f'{tensor.name}: shard {both}: found twice (a leading "model." counts for nothing), expected once')
    return [
        *shards.problems,
        *_format_hints(found, weight_map),
        *repeated,
        *_expected_tensors(found, shards, weight_map),
        *_extra_tensors(found, weight_map),
        *_index_disagreements(found, shards, weight_map),
    ]


def _expected_tensors(found: Mapping[str, StoredTensor], shards: ShardSet, weight_map: WeightMap) -> Iterator[str]:
    index = shards.index or {}
    no_shards = not shards.shards
    for name, spec in weight_map.tensors.items():
        tensor = found.get(name)
        if tensor is None:
            if no_shards or index.get(name) in shards.unreadable:
                continue  # the file itself is the problem and has its line
            place = f" (the index places it in {index[name]})" if name in index else ""
            yield f"{name}: missing{place}, expected {_words(spec)}"
        elif tensor.shape != spec.shape:
            yield f"{name}: shard {tensor.shard}: found shape {list(tensor.shape)}, expected {list(spec.shape)}"
        elif tensor.dtype not in spec.dtypes:
            yield f"{name}: shard {tensor.shard}: found dtype {tensor.dtype}, expected {' or '.join(spec.dtypes)}"


def _extra_tensors(found: Mapping[str, StoredTensor], weight_map: WeightMap) -> Iterator[str]:
    for name, tensor in found.items():
        if name not in weight_map.tensors and weight_map.rule_for(name) is None:
            yield f"{name}: shard {tensor.shard}: found {tensor.dtype} {list(tensor.shape)}, expected no tensor of this name"


def _index_disagreements(found: Mapping[str, StoredTensor], shards: ShardSet, weight_map: WeightMap) -> Iterator[str]:
    """Only what no other line has said: a missing or extra tensor is reported once."""
    if shards.index is None:
        return
    for name, shard in shards.index.items():
        tensor = found.get(name)
        if tensor is not None and tensor.shard != shard:
            yield f"{name}: shard {tensor.shard}: found there, expected in {shard} by {INDEX_FILE}"
        elif tensor is None and name not in weight_map.tensors and shard not in shards.unreadable:
            yield f"{name}: shard {shard}: found no such tensor, expected by {INDEX_FILE}"
    for name, tensor in found.items():
        if name not in shards.index and name in weight_map.tensors:
            yield f"{name}: shard {tensor.shard}: found there, but {INDEX_FILE} does not name it"


def _format_hints(found: Mapping[str, StoredTensor], weight_map: WeightMap) -> Iterator[str]:
    """One line for the usual cause of a thousand: config and shards disagree about quantisation."""
    expects_scales = any(name.endswith(".scale") for name in weight_map.tensors)
    scales = sum(name.endswith(".scale") for name in found)
    if scales and not expects_scales:
        yield f"config.json: quantization_config: missing, but the shards hold {scales:,} scale tensors of quantised weights"
    if expects_scales and found and not scales:
        yield "config.json: quantization_config: found, but the shards hold no scale tensor: their weights are not quantised"


def _words(spec: TensorSpec) -> str:
    return f"{' or '.join(spec.dtypes)} {list(spec.shape)}"
