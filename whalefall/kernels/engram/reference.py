# SPDX-License-Identifier: Apache-2.0
"""Engram: hashed n-gram rows, and the gate that adds them to the streams. Source: design note deepseek-v41 §3.10."""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.kernels.engram import cases
from whalefall.kernels.quant.reference import dequantize_fp8_row
from whalefall.kernels.registry import op


@op("engram.hash_rows", cases=cases.ids)
def hash_rows(compressed_TK: Tensor, pad_id: int, multipliers_K: Tensor, primes_NJ: Tensor, offsets_NJ: Tensor) -> Tensor:
    """Table row of every n-gram slot.

    Args:
        compressed_TK: int64 compressed ids of the token itself and the K - 1 before it; -1 = none (sequence start, image, unknown id).
        pad_id: compressed id that fills blocked look-back; once a position is blocked, all farther ones are too.
        multipliers_K: int64, products stay below 2**63 by construction.
        primes_NJ, offsets_NJ: int64 per n-gram size 2..K and hash head.
    Returns:
        int64 [T, N * J], slots in order of n-gram size, then head.
    """
    blocked_TK = (compressed_TK < 0).cummax(dim=1).values
    ids_TK = torch.where(blocked_TK, pad_id, compressed_TK)
    products_TK = ids_TK * multipliers_K
    hash_T = products_TK[:, 0]
    rows = []
    for n in range(primes_NJ.shape[0]):
        hash_T = hash_T ^ products_TK[:, n + 1]
        rows.append(hash_T[:, None] % primes_NJ[n] + offsets_NJ[n])
    return torch.cat(rows, dim=1)


@op("engram.gather_dense", cases=cases.dense_rows)
def gather_dense(table_RC: Tensor, rows_TJ: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows joined in slot order: [T, J * C] in dtype."""
    return table_RC[rows_TJ].flatten(1).to(dtype)


@op("engram.gather_fp8", cases=cases.fp8_rows)
def gather_fp8(table_RC: Tensor, scale_Rg: Tensor, rows_TJ: Tensor, dtype: torch.dtype) -> Tensor:
    """As `gather_dense` for FP8 rows with one UE8M0 scale per 32 columns; only the gathered rows are dequantised."""
    # Indexing bytes: not every device and torch version gathers float8.
    picked = table_RC.view(torch.uint8)[rows_TJ].view(torch.float8_e4m3fn)
    return dequantize_fp8_row(picked.flatten(0, 1), scale_Rg[rows_TJ].flatten(0, 1), dtype).unflatten(0, rows_TJ.shape).flatten(1)


@op("engram.inject", cases=cases.gated)
def inject(streams_TSH: Tensor, keys_TSH: Tensor, value_TH: Tensor, q_weight_SH: Tensor, k_weight_SH: Tensor, eps: float) -> Tensor:
    """Add the gated value to every stream: R_s + sigmoid(sign(d) * sqrt(max(|d|, 1e-6))) * v, d the normed product of stream and key.

    Float32 inside, rounded once to the streams' dtype.
    """
    streams32, keys32 = streams_TSH.float(), keys_TSH.float()
    dot_TS = (streams32 * (q_weight_SH * k_weight_SH) * keys32).sum(-1)
    norm_TS = torch.rsqrt(streams32.square().mean(-1) + eps) * torch.rsqrt(keys32.square().mean(-1) + eps)
    d_TS = dot_TS * norm_TS * streams_TSH.shape[-1] ** -0.5
    gate_TS = torch.sigmoid(torch.copysign(d_TS.abs().clamp_min(1e-6).sqrt(), d_TS))
    return torch.addcmul(streams32, gate_TS[:, :, None], value_TH.float()[:, None]).to(streams_TSH.dtype)
