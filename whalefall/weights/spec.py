# SPDX-License-Identifier: Apache-2.0
"""WeightMap: what a model expects to find in a checkpoint. Plain data, made by a model family, checked against shard headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Bytes per element of each safetensors dtype that we read."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Accepted safetensors dtype names, e.g. ("BF16", "F32") or ("F8_E4M3",); the usual one first."""

    @property
    def num_bytes(self) -> int:
        """Size in the usual dtype."""
        size = DTYPE_BYTES[self.dtypes[0]]
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, slots=True)
class IgnoreRule:
    prefix: str
    """Tensors whose name (without "model.") starts with this are not loaded."""
    reason: str
    """Said in the load report, e.g. "draft blocks: speculation is off"."""
    num_expected: int | None = None
    """How many such tensors the family's full checkpoint has; None when nobody counted. A difference is told, never an error."""


@dataclass(frozen=True, slots=True)
class WeightMap:
    tensors: Mapping[str, TensorSpec]
    """Checkpoint name (without the optional "model." prefix) -> what must be there. Each is consumed exactly once."""
    ignored: tuple[IgnoreRule, ...] = ()

    def rule_for(self, name: str) -> IgnoreRule | None:
        """The rule that leaves this tensor out, or None."""
        return next((rule for rule in self.ignored if name.startswith(rule.prefix)), None)
