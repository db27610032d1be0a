# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding on the last dims of a vector, pairs interleaved. Source: design note deepseek-v41 §3.0."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whalefall.kernels.registry import op
from whalefall.kernels.rope import cases


def plain_frequencies(dim: int, base: float) -> Tensor:
    """float32 [dim / 2]: base ** (-2i / dim)."""
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def yarn_frequencies(dim: int, base: float, *, factor: float, original_max: int, beta_fast: float, beta_slow: float) -> Tensor:
    """float32 [dim / 2] frequencies with the YaRN blend; no attention temperature.

    Fast dims keep the plain frequency, slow ones are divided by `factor`, with a linear ramp between the dims that turn `beta_fast` and
    `beta_slow` times over `original_max` positions. Source: "YaRN: Efficient Context Window Extension of Large Language Models", §3.2.
    """

    def dim_of(turns: float) -> float:
        return dim * math.log(original_max / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(0, math.floor(dim_of(beta_fast)))
    high: float = min(dim - 1, math.ceil(dim_of(beta_slow)))
    if high == low:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    plain = plain_frequencies(dim, base)
    return plain / factor * ramp + plain * (1 - ramp)


def angles(positions_T: Tensor, frequencies_F: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin), float32 [T, F] each, of position times frequency."""
    theta_TF = positions_T.float()[:, None] * frequencies_F
    return theta_TF.cos(), theta_TF.sin()


@op("rope.rotate", cases=cases.vectors)
def rotate(x: Tensor, cos_TF: Tensor, sin_TF: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2F dims of x; the leading ones pass through.

    Args:
        x: [T, D] or [T, N, D]; elements 2i and 2i + 1 of the rotated slice are one complex number.
        cos_TF, sin_TF: from `angles`, one row per token.
        inverse: rotate by the negative angle.
    Returns:
        A new tensor like x; computed in float32 and rounded once.
    """
    width = 2 * cos_TF.shape[-1]
    turn_TF = torch.complex(cos_TF, -sin_TF if inverse else sin_TF)
    if x.dim() == 3:
        turn_TF = turn_TF[:, None]
    out = x.clone(memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(out[..., -width:].float().unflatten(-1, (-1, 2)).contiguous())
    out[..., -width:] = torch.view_as_real(pairs * turn_TF).flatten(-2)
    return out
