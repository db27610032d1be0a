# SPDX-License-Identifier: Apache-2.0
"""Matrix products of a token batch with a weight [out, in], dense or packed."""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.kernels.gemm import cases
from whalefall.kernels.quant.reference import dequantize_fp8_tile
from whalefall.kernels.registry import op

_FLOAT32_TILE_ELEMENTS = 1 << 24


@op("gemm.linear", cases=cases.dense)
def linear(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """x @ w.T in x's dtype, accumulated in float32."""
    return torch.nn.functional.linear(x_TK, w_NK)


@op("gemm.linear_fp8_tile", cases=cases.fp8_tiles)
def linear_fp8_tile(x_TK: Tensor, w_NK: Tensor, scale_nk: Tensor) -> Tensor:
    """x @ w.T for a packed FP8 tile weight, dequantised to x's dtype on the way."""
    return torch.nn.functional.linear(x_TK, dequantize_fp8_tile(w_NK, scale_nk, x_TK.dtype))


@op("gemm.linear_float32", cases=cases.float32_results)
def linear_float32(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """x @ w.T with a float32 result that is never rounded to a narrower type: logits, gate scores, compressor inputs.

    Narrow weights are widened a tile of rows at a time, so the float32 copy of a large head never exists whole.
    """
    x32_TK = x_TK.float()
    if w_NK.dtype == torch.float32:
        return torch.nn.functional.linear(x32_TK, w_NK)
    rows = max(1, _FLOAT32_TILE_ELEMENTS // w_NK.shape[1])
    return torch.cat([torch.nn.functional.linear(x32_TK, part.float()) for part in w_NK.split(rows)], dim=-1)


@op("gemm.grouped_linear", cases=cases.groups)
def grouped_linear(x_TGK: Tensor, w_GNK: Tensor) -> Tensor:
    """One product per group: [T, G, K] x [G, N, K] -> [T, G, N]."""
    return torch.bmm(x_TGK.transpose(0, 1), w_GNK.transpose(1, 2)).transpose(0, 1)


@op("gemm.grouped_linear_fp8_tile", cases=cases.fp8_tile_groups)
def grouped_linear_fp8_tile(x_TGK: Tensor, w_NK: Tensor, scale_nk: Tensor) -> Tensor:
    """As `grouped_linear`, with the groups' weights one above the other in one packed FP8 tile weight [G * O, K]: [T, G, O]."""
    w_GOK = dequantize_fp8_tile(w_NK, scale_nk, x_TGK.dtype).unflatten(0, (x_TGK.shape[1], -1))
    return grouped_linear.reference(x_TGK, w_GOK)
