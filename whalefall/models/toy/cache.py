# SPDX-License-Identifier: Apache-2.0
"""What the toy keeps: one key and one value per token and layer, in blocks that grow with the sequence."""

from __future__ import annotations

from whalefall.core.cache_spec import CacheSpec, GrowingField
from whalefall.models.definition import BuildContext
from whalefall.models.toy.config import ToyConfig


def field_name(layer: int) -> str:
    return f"layers.{layer}.kv"


def cache_spec(config: ToyConfig, context: BuildContext, block_tokens: int) -> CacheSpec:
    dtype = str(context.dtype).removeprefix("torch.")
    return CacheSpec(
        block_tokens=block_tokens,
        growing=tuple(
            GrowingField(name=field_name(layer), width=2 * config.hidden_size, dtype=dtype, tokens_per_entry=1)
            for layer in range(config.num_hidden_layers)
        ),
    )
