# SPDX-License-Identifier: Apache-2.0
"""How much memory the weights take once loaded, by kind and to the byte, without loading anything.

The model's own modules are made on torch's meta device, where a tensor has a size and no memory, and their parameters are added up. So the
figure cannot drift from what is built. Serves the start-up table and `whalefall plan`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from whalefall.layers.linear import Storage
from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.deepseek_v41.model import Block, DeepseekV41
from whalefall.models.deepseek_v41.weights import parameters, stored_tensors
from whalefall.models.definition import BuildContext, WeightKind

_TABLE = ".engram.embed."


def footprint(config: DeepseekV41Config, context: BuildContext) -> tuple[WeightKind, ...]:
    """Largest first; the Engram tables are mapped, whatever the storage of the rest."""
    meta = replace(context, device=torch.device("meta"))
    # The hash of Engram needs the tokenizer's files and no memory to speak of: build without it, then add the modules themselves.
    model = DeepseekV41(replace(config, engram_layer_ids=()), meta)
    is_packed = context.weights == "packed"
    storage = Storage(dtype=context.dtype, device=meta.device, is_quantised=config.is_quantised, is_packed=is_packed)
    sizes: dict[str, int] = {}
    _add(sizes, "", model)
    for layer in config.engram_layer_ids:
        engram = Block(config, layer, meta, storage).engram
        assert engram is not None
        _add(sizes, f"layers.{layer}.engram.", engram)
    kinds = [
        WeightKind(name=name, num_bytes=size, place="device", is_split_over_experts=name == "routed experts")
        for name, size in sizes.items()
    ]
    tables = _table_bytes(config)
    if tables:
        kinds.append(WeightKind(name="Engram tables", num_bytes=tables, place="mapped"))
    return tuple(sorted(kinds, key=lambda kind: -kind.num_bytes))


def _add(sizes: dict[str, int], prefix: str, module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        kind = kind_of(prefix + name)
        sizes[kind] = sizes.get(kind, 0) + tensor.numel() * tensor.element_size()


def kind_of(name: str) -> str:
    """The kind of a parameter of the built model, or of a checkpoint tensor."""
    if name.startswith("mtp."):
        return "draft blocks"
    if name.startswith(("embed.", "head.", "norm.")):
        return "embedding and head"
    if ".experts." in name:
        return "routed experts"
    if ".engram." in name:
        return "Engram projections"
    if ".indexer." in name or ".compressor." in name:
        return "indexers and compressors"
    if ".attn." in name:
        return "attention"
    return "gate, shared expert, streams, norms"


def _table_bytes(config: DeepseekV41Config) -> int:
    """Of the tables as stored; a checkpoint without quantisation keeps them in bfloat16, the first accepted type."""
    tables = {name: parameter for name, parameter in parameters(config).items() if _TABLE in name + "."}
    return sum(spec.num_bytes for spec in stored_tensors(tables, config.is_quantised).values())
