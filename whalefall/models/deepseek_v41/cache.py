# SPDX-License-Identifier: Apache-2.0
"""What V4.1 keeps: growing main and index entries in the KV sources, window rings everywhere, an open group per compressor.

Source: design note deepseek-v41 §5. Rounded formats are stored as their exact values in the activation dtype.
"""

from __future__ import annotations

import torch

from whalefall.core.cache_spec import CacheSpec, GrowingField, RingField
from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.definition import BuildContext

ENCODER_RING = "encoder"
"""Windows written by every row: all layers up to and including the border layer, the first of the decoder."""
DECODER_RING = "decoder"
"""Windows written by decoder rows only: the layers above the border layer, and the draft blocks."""


def main_field(layer: int) -> str:
    return f"layers.{layer}.main"


def index_field(layer: int) -> str:
    return f"layers.{layer}.index"


def window_field(layer: int) -> str:
    return f"layers.{layer}.window"


def draft_window_field(index: int) -> str:
    return f"mtp.{index}.window"


def pending_field(layer: int) -> str:
    return f"layers.{layer}.pending"


def pending_group(ratio: int) -> str:
    return f"pending{ratio}"


def window_group(config: DeepseekV41Config, layer: int) -> str:
    return ENCODER_RING if layer <= config.num_encoder_layers else DECODER_RING


def cache_spec(config: DeepseekV41Config, context: BuildContext, block_tokens: int) -> CacheSpec:
    dtype = str(context.dtype).removeprefix("torch.")
    growing, rings = [], []
    for layer in config.kv_source_layer_ids:
        ratio = config.ratio(layer)
        growing.append(GrowingField(name=main_field(layer), width=config.head_dim, dtype=dtype, tokens_per_entry=ratio))
        growing.append(GrowingField(name=index_field(layer), width=config.index_head_dim, dtype=dtype, tokens_per_entry=ratio))
        if ratio > 1:
            # Value and gate of the open group's tokens, float32 as they are pooled.
            rings.append(_ring(pending_field(layer), 2 * config.head_dim, "float32", ratio, pending_group(ratio), context))
    for layer in range(config.num_hidden_layers):
        group = window_group(config, layer)
        rings.append(_ring(window_field(layer), config.head_dim, dtype, config.sliding_window, group, context))
    if context.uses_own_drafter:
        for index in range(config.num_nextn_predict_layers):
            rings.append(_ring(draft_window_field(index), config.head_dim, dtype, config.sliding_window, DECODER_RING, context))
    return CacheSpec(block_tokens=block_tokens, growing=tuple(growing), rings=tuple(rings))


def _ring(name: str, width: int, dtype: str, window: int, group: str, context: BuildContext) -> RingField:
    """A step writes 1 + k rows at positions s ... s + k, of which its first query sees s - window + 1 ... s; refused, the next step begins
    at s + 1 or later. With window + k rows the newest row written takes the place of s - window, which nobody sees any more.
    """
    spare = context.max_draft_tokens
    return RingField(name=name, width=width, dtype=dtype, rows=window + spare, group=group, num_spare_rows=spare)


def is_rounded(context: BuildContext) -> bool:
    """Whether cache entries are rounded to the model's formats (design note §3.4-3.6)."""
    return context.kv_cache_dtype == "model" and context.dtype in (torch.float32, torch.bfloat16)
