# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of the toy's checkpoint tensors. They are the parameters' own names, so loading needs no further map."""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.models.toy.config import ToyConfig
from whalefall.weights.spec import TensorSpec, WeightMap


def tensor_shapes(config: ToyConfig) -> dict[str, tuple[int, ...]]:
    """Checkpoint name -> shape, in file order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        shapes[prefix + "attn_norm.weight"] = (hidden,)
        shapes[prefix + "wqkv.weight"] = (3 * hidden, hidden)
        shapes[prefix + "wo.weight"] = (hidden, hidden)
        shapes[prefix + "ffn_norm.weight"] = (hidden,)
        shapes[prefix + "w1.weight"] = (inner, hidden)
        shapes[prefix + "w2.weight"] = (hidden, inner)
    return shapes | {"norm.weight": (hidden,), "head.weight": (config.vocab_size, hidden)}


def weight_map(config: ToyConfig) -> WeightMap:
    return WeightMap({name: TensorSpec(shape, ("F32", "BF16")) for name, shape in tensor_shapes(config).items()})


def random_weights(config: ToyConfig, seed: int) -> dict[str, Tensor]:
    """Seeded float32 weights, large enough that attention is selective and the best next token stands out."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        drawn = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            tensors[name] = 1 + 0.1 * drawn
        else:
            tensors[name] = drawn if name == "embed.weight" else 1.5 * drawn / shape[1] ** 0.5
    return tensors
