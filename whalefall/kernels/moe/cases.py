# SPDX-License-Identifier: Apache-2.0
"""Sample inputs of the gate and the experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from whalefall.kernels.cases import FLOATS, fp4_bytes, fp8_bytes, integers, normal, rows_apart, scale_bytes


def logits() -> Iterator[tuple[Any, ...]]:
    for tokens, experts, k in ((0, 8, 2), (1, 8, 2), (33, 16, 3), (17, 384, 6), (3, 4, 4)):
        yield 2 * normal(tokens, experts), 0.1 * normal(experts, seed=1), k, 1.5
    yield torch.zeros(3, 8), torch.zeros(8), 3, 1.0  # all tie
    yield integers(9, 16, low=-1, high=2, dtype=torch.float32), integers(16, low=0, high=2, dtype=torch.float32), 4, 2.5
    yield torch.tensor([[60.0, 21, 20, 19, 0, -20, -60, 5]]), torch.tensor([-9.0, 0, 0, 0, 0, 0, 9, 0]), 5, 1.5


def swiglu() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for tokens, inner, limit in ((0, 8, 10.0), (1, 16, 10.0), (33, 31, 1.5), (5, 2304, 10.0)):
            yield 8 * normal(tokens, inner, dtype=dtype), 8 * normal(tokens, inner, seed=1, dtype=dtype), limit
        yield *rows_apart(8 * normal(4, 64, seed=2, dtype=dtype)).chunk(2, dim=-1), 10.0


def dense() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for tokens, experts, hidden, inner in _SIZES:
            w13_EFH = normal(experts, 2 * inner, hidden, seed=2, dtype=dtype) / hidden**0.5
            w2_EHF = normal(experts, hidden, inner, seed=3, dtype=dtype) / inner**0.5
            for expert_TA, weight_TA in _choices(tokens, experts):
                yield 3 * normal(tokens, hidden, seed=4, dtype=dtype), expert_TA, weight_TA, w13_EFH, w2_EHF, 1.5


def mxfp4() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for tokens, experts, hidden, inner in (*_SIZES, *_WHOLE_SIZES):
            w13 = fp4_bytes(experts, 2 * inner, hidden // 2, seed=2), scale_bytes(experts, 2 * inner, hidden // 32, low=121, high=125)
            w2 = fp4_bytes(experts, hidden, inner // 2, seed=3), scale_bytes(experts, hidden, inner // 32, low=121, high=125)
            for expert_TA, weight_TA in _choices(tokens, experts):
                yield normal(tokens, hidden, seed=4, dtype=dtype), expert_TA, weight_TA, *w13, *w2, 10.0


def mxfp4_onto() -> Iterator[tuple[Any, ...]]:
    for i, args in enumerate(mxfp4()):
        if i % 5 == 0:
            yield 2 * normal(*args[0].shape, seed=7, dtype=args[0].dtype), *args


def fp8_swiglu() -> Iterator[tuple[Any, ...]]:
    for dtype in FLOATS:
        for tokens, hidden, inner in ((0, 64, 32), (3, 64, 32), (1, 256, 64), (9, 512, 128), (20, 256, 64), (40, 256, 64)):
            weights = []
            for seed in (1, 2):
                weights += [fp8_bytes(inner, hidden, seed=seed), scale_bytes(inner // 32, hidden // 32, low=114, high=118)]
            yield normal(tokens, hidden, dtype=dtype), *weights, 10.0


_SIZES = ((0, 4, 32, 32), (1, 4, 32, 32), (17, 4, 64, 32), (9, 3, 96, 64))
"""(T, E, H, F)."""
_WHOLE_SIZES = ((5, 4, 256, 256), (22, 5, 512, 256), (40, 4, 256, 256), (70, 2, 256, 512))
"""The same, in whole tiles of the products on a GPU; few, some and many rows an expert."""


def _choices(tokens: int, experts: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Two experts a token at random, and all tokens on the same two, the last one and the first."""
    weight_TA = normal(tokens, 2, seed=5).abs()
    yield normal(tokens, experts, seed=6).argsort(-1)[:, :2], weight_TA
    yield torch.tensor([experts - 1, 0]).expand(tokens, 2), weight_TA
