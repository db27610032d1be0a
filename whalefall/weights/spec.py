# SPDX-License-Identifier: Apache-2.0
"""WeightMap: what a model expects to find in a checkpoint. Plain data, made by a model family, checked against shard headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Accepted safetensors dtype names, e.g. ("BF16", "F32") or ("F8_E4M3",)."""


@dataclass(frozen=True, slots=True)
class IgnoreRule:
    prefix: str
    """Tensors whose name (without "model.") starts with this are not loaded."""
    reason: str
    """Said in the load report, e.g. "draft blocks: speculation is off"."""


@dataclass(frozen=True, slots=True)
class WeightMap:
    tensors: Mapping[str, TensorSpec]
    """Checkpoint name (without the optional "model." prefix) -> what must be there. Each is consumed exactly once."""
    ignored: tuple[IgnoreRule, ...] = ()
