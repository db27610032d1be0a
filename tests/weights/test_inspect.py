# SPDX-License-Identifier: Apache-2.0
"""Claims about counting a checkpoint from its headers."""

from __future__ import annotations

from whalefall.weights.inspect import group_by_format, group_by_kind
from whalefall.weights.safetensors import StoredTensor


def stored(name: str, dtype: str, *shape: int) -> StoredTensor:
    size = {"I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4}[dtype]
    for length in shape:
        size *= length
    return StoredTensor(name, dtype, shape, "model.safetensors", 0, size)


TENSORS = [
    stored("embed.weight", "BF16", 10, 64),
    stored("layers.0.attn.wkv.weight", "F8_E4M3", 32, 64),
    stored("layers.0.attn.wkv.scale", "F8_E8M0", 1, 2),
    stored("layers.0.hc_attn_scale", "F32", 3),
    stored("layers.0.ffn.experts.0.w1.weight", "I8", 32, 32),
    stored("layers.0.ffn.experts.0.w1.scale", "F8_E8M0", 32, 2),
    stored("layers.1.engram.embed.weight", "F8_E4M3", 100, 32),
    stored("layers.1.engram.embed.scale", "F8_E8M0", 100, 1),
    stored("mtp.0.ffn.experts.0.w1.weight", "I8", 32, 32),
    stored("mtp.0.ffn.experts.0.w1.scale", "F8_E8M0", 32, 2),
    stored("vision.norm.weight", "BF16", 8),
]


def test_kinds_tell_tensors_bytes_and_parameters() -> None:
    found = {group.name: (group.num_tensors, group.num_bytes, group.num_parameters) for group in group_by_kind(TENSORS)}
    assert found == {
        "global": (1, 1280, 640),
        "layers": (3, 2048 + 2 + 12, 2048 + 3),
        "routed experts": (2, 1024 + 64, 2048),
        "engram tables": (2, 3300, 3200),
        "draft": (2, 1088, 2048),
        "vision": (1, 16, 8),
    }


def test_scales_stand_with_their_weights_in_the_formats() -> None:
    found = {group.name: (group.num_tensors, group.num_parameters) for group in group_by_format(TENSORS)}
    assert found == {"BF16": (2, 648), "FP8 + scales": (4, 5248), "FP4 + scales": (4, 4096), "F32": (1, 3)}
