# SPDX-License-Identifier: Apache-2.0
"""Attention over gathered keys: a window part and a compressed part, one latent as key and value, a sink per head.

Source: design note deepseek-v41 §3.7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.kernels.attention import cases
from whalefall.kernels.registry import op

_TILE_BYTES = 32 << 20
"""Gathered keys of one tile of tokens; small enough to stay near the cache of a CPU core."""


@op("attention.sparse_mqa", cases=cases.gathered)
def sparse_mqa(
    q_TND: Tensor,
    window_kv_MD: Tensor,
    window_index_TW: Tensor,
    main_kv_CD: Tensor | None,
    main_index_TK: Tensor | None,
    sink_N: Tensor,
    scale: float,
) -> Tensor:
    """Attention of each token over its own list of rows; key and value are the same row.

    Args:
        window_kv_MD: rows that window_index_TW (int64, -1 = absent) points into; the rows of one token's list are distinct.
        main_kv_CD, main_index_TK: the same for compressed entries; None in layers without them.
        sink_N: float32 logit per head that takes part in the softmax and has no value; not scaled.
        scale: multiplies q . k.
    Returns:
        [T, N, D] in q's dtype; products, softmax and sums in float32, rounded once at the end. A token with no key at all gives zeros.
    """
    keys = window_index_TW.shape[1] + (main_index_TK.shape[1] if main_index_TK is not None else 0)
    tile = max(1, _TILE_BYTES // max(1, keys * q_TND.shape[2] * q_TND.element_size()))
    parts = []
    for begin in range(0, max(1, q_TND.shape[0]), tile):  # without tokens one empty tile gives the shape
        rows = slice(begin, begin + tile)
        kv, index = _gather(window_kv_MD, window_index_TW[rows])
        if main_kv_CD is not None and main_index_TK is not None:
            main_kv, main_index = _gather(main_kv_CD, main_index_TK[rows])
            kv, index = torch.cat((kv, main_kv), dim=1), torch.cat((index, main_index), dim=1)
        parts.append(_attend(q_TND[rows], kv, index, sink_N, scale))
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def _gather(kv_MD: Tensor, index_TK: Tensor) -> tuple[Tensor, Tensor]:
    picked = kv_MD.index_select(0, index_TK.clamp_min(0).reshape(-1))
    return picked.view(*index_TK.shape, kv_MD.shape[1]), index_TK


def _attend(q_TND: Tensor, kv_TKD: Tensor, index_TK: Tensor, sink_N: Tensor, scale: float) -> Tensor:
    # A logit rounded to bfloat16 would be off by 1 in 256: products stay float32 to the end.
    kv_TKD = kv_TKD.float()
    absent_T1K = (index_TK < 0)[:, None]
    logit_TNK = (torch.bmm(q_TND.float(), kv_TKD.transpose(1, 2)) * scale).masked_fill(absent_T1K, -torch.inf)
    sink_1N1 = sink_N[None, :, None]
    top_TN1 = torch.maximum(logit_TNK.amax(-1, keepdim=True), sink_1N1)
    weight_TNK = torch.exp(logit_TNK - top_TN1)
    total_TN1 = weight_TNK.sum(-1, keepdim=True) + torch.exp(sink_1N1 - top_TN1)
    # An absent row may hold anything, also NaN: zero it, because 0 * NaN is NaN.
    kv_TKD = kv_TKD.masked_fill(absent_T1K.transpose(1, 2), 0)
    return torch.bmm(weight_TNK / total_TN1, kv_TKD).to(q_TND.dtype)
