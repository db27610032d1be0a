# SPDX-License-Identifier: Apache-2.0
"""Makers of sample inputs, shared by the families' cases.

A family's `cases.py` yields argument tuples that hold the edges of its ops: zero tokens, one, tile sizes plus and minus one, rows that do
not lie end to end, everything masked, ties, one larger shape. Every call yields the same values again.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16)
"""Activation dtypes that every op takes."""


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*shape: int, low: int, high: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Uniform in [low, high). As small floats they make sums that are exact in any order, so that ties stay ties."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_apart(x: Tensor) -> Tensor:
    """The same values with a gap after each row; the gap holds NaN where the dtype has one."""
    width = x.shape[-1]
    wide = torch.empty(*x.shape[:-1], width + 3, dtype=x.dtype)
    wide.fill_(torch.nan if x.is_floating_point() else 0)
    wide[..., :width] = x
    return wide[..., :width]


def fp8_bytes(*shape: int, seed: int = 0) -> Tensor:
    """float8_e4m3fn of every kind: subnormals, both zeros, both signs, the largest; no NaN."""
    raw = integers(*shape, low=0, high=256, seed=seed, dtype=torch.uint8)
    return torch.where((raw & 0x7F) == 0x7F, raw ^ 1, raw).view(torch.float8_e4m3fn)


def scale_bytes(*shape: int, seed: int = 0, low: int = 120, high: int = 130) -> Tensor:
    """UE8M0 exponents around 1."""
    return integers(*shape, low=low, high=high, seed=seed, dtype=torch.uint8)


def fp4_bytes(*shape: int, seed: int = 0) -> Tensor:
    """Pairs of E2M1 codes, any byte."""
    return integers(*shape, low=0, high=256, seed=seed, dtype=torch.uint8).view(torch.int8)
