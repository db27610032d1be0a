# SPDX-License-Identifier: Apache-2.0
"""What lies in a checkpoint, counted from the headers alone: tensors, bytes and parameters by kind and by storage format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from whalefall.weights.safetensors import StoredTensor

_KINDS = (
    ("draft", lambda name: name.startswith("mtp.")),
    ("vision", lambda name: name.startswith(("vision.", "aligner.", "image_"))),
    ("engram tables", lambda name: ".engram.embed." in name),
    ("routed experts", lambda name: ".experts." in name),
    ("layers", lambda name: name.startswith("layers.")),
    ("global", lambda name: True),
)
"""First match wins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    name: str
    num_tensors: int
    num_bytes: int
    num_parameters: int
    """Values the model computes with: scales count nothing, a byte of packed FP4 counts two."""


def group_by_kind(tensors: Iterable[StoredTensor]) -> tuple[TensorGroup, ...]:
    """Largest group first."""
    found = list(tensors)
    return _group(found, {tensor.name: next(kind for kind, holds in _KINDS if holds(tensor.name)) for tensor in found})


def group_by_format(tensors: Iterable[StoredTensor]) -> tuple[TensorGroup, ...]:
    """By dtype of the weight; a quantised weight's scales stand with it."""
    found = list(tensors)
    dtypes = {tensor.name: tensor.dtype for tensor in found}
    return _group(found, {name: _format_name(name, dtypes) for name in dtypes})


def _format_name(name: str, dtypes: Mapping[str, str]) -> str:
    stem, _, part = name.rpartition(".")
    weight = dtypes.get(f"{stem}.weight") if part == "scale" else dtypes[name]
    if f"{stem}.scale" not in dtypes or weight is None:
        return dtypes[name]
    return {"I8": "FP4 + scales", "U8": "FP4 + scales", "F8_E4M3": "FP8 + scales"}.get(weight, f"{weight} + scales")


def _group(tensors: list[StoredTensor], group_of: Mapping[str, str]) -> tuple[TensorGroup, ...]:
    names = {tensor.name for tensor in tensors}
    sums: dict[str, list[int]] = {}
    for tensor in tensors:
        entry = sums.setdefault(group_of[tensor.name], [0, 0, 0])
        entry[0] += 1
        entry[1] += tensor.num_bytes
        entry[2] += _num_parameters(tensor, names)
    made = [TensorGroup(name=name, num_tensors=n, num_bytes=b, num_parameters=p) for name, (n, b, p) in sums.items()]
    return tuple(sorted(made, key=lambda group: -group.num_bytes))


def _num_parameters(tensor: StoredTensor, names: set[str]) -> int:
    stem, _, part = tensor.name.rpartition(".")
    if part == "scale" and f"{stem}.weight" in names:
        return 0
    count = 1
    for length in tensor.shape:
        count *= length
    is_packed_fp4 = part == "weight" and tensor.dtype in ("I8", "U8") and f"{stem}.scale" in names
    return 2 * count if is_packed_fp4 else count
