# SPDX-License-Identifier: Apache-2.0
"""The sparse attention on a CPU: tokens that stand together share their keys, so one matrix product replaces many small gathers.

Neighbouring rows of a prompt see almost the same window, and often much the same entries. For a tile of tokens whose lists lie in a narrow
range of rows, the range is scored as a whole and a bias per (token, row), the log of how often the row stands in the token's list, says
which of the scores count. Lists that lie far apart (decode, long contexts) are gathered per token, window and entries apart, so that no
joined copy is made. The sink is one more key, of zeros: then a single softmax does all.
Benchmark: benchmarks/kernels/cpu_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whalefall.kernels.attention.reference import sparse_mqa
from whalefall.kernels.registry import Device

_TILE_TOKENS = 64
_TILE_BYTES = 8 << 20
"""Gathered keys of one tile; stays near a core's cache."""
_RANGE_FACTOR = 4
"""A range this many times longer than a list is still scored faster than the list is gathered."""


@dataclass(slots=True)
class _Part:
    """One list of a tile, ready to score: keys shared by the tile ([U, D]) or each token's own ([t, K, D])."""

    kv: Tensor
    bias: Tensor
    """float32 [t, U or K]: added to the scores; the log of how often each row stands in the token's list."""
    is_shared: bool


def _is_worth_it(q_TND: Tensor, *_: object, **__: object) -> bool:
    return q_TND.shape[0] > 1  # a single token has nobody to share with, and its list is one small gather


@sparse_mqa.impl("cpu_tiles", needs=Device(type="cpu"), when=_is_worth_it)
def sparse_mqa_cpu(
    q_TND: Tensor,
    window_kv_MD: Tensor,
    window_index_TW: Tensor,
    main_kv_CD: Tensor | None,
    main_index_TK: Tensor | None,
    sink_N: Tensor,
    scale: float,
) -> Tensor:
    lists = [(window_kv_MD, window_index_TW)]
    if main_kv_CD is not None and main_index_TK is not None and main_index_TK.shape[1]:
        lists.append((main_kv_CD, main_index_TK))
    out_TND = torch.empty_like(q_TND)
    keys = sum(index.shape[1] for _, index in lists)
    tile = max(1, min(_TILE_TOKENS, _TILE_BYTES // max(1, keys * q_TND.shape[2] * 4)))
    tile = _TILE_TOKENS if tile * 2 > _TILE_TOKENS else tile
    for begin in range(0, q_TND.shape[0], tile):
        rows = slice(begin, begin + tile)
        parts = [_part(kv, index[rows]) for kv, index in lists]
        out_TND[rows] = _attend(q_TND[rows].float() * scale, parts, sink_N)
    return out_TND


def _part(kv_MD: Tensor, index_TK: Tensor) -> _Part:
    tokens, width = index_TK.shape
    if tokens > 1:
        low = int(torch.where(index_TK < 0, kv_MD.shape[0], index_TK).min())
        length = int(index_TK.max()) + 1 - low
        if 0 < length <= _RANGE_FACTOR * width:
            kv_UD = kv_MD[low : low + length].float()
            # A row that is in nobody's list takes part with weight 0; 0 * NaN would be NaN for everybody.
            if bool(kv_UD.sum().isfinite()):
                count = torch.zeros(tokens, length + 1)
                count.scatter_add_(1, torch.where(index_TK < 0, length, index_TK - low), torch.ones(()).expand(tokens, width))
                return _Part(kv_UD, count[:, :length].log(), is_shared=True)
    # An absent key borrows a row of the same token's list: it has weight 0, and a token's own rows are as finite as the token itself.
    present = index_TK >= 0
    borrowed = index_TK.amax(1, keepdim=True) if width else index_TK
    row = torch.where(present, index_TK, borrowed)
    kv_TKD = kv_MD.index_select(0, row.clamp_min(0).view(-1)).view(tokens, width, kv_MD.shape[1]).float()
    if width and bool((borrowed < 0).any()):
        kv_TKD = kv_TKD.masked_fill((borrowed < 0)[:, :, None], 0)  # a token with an empty list
    return _Part(kv_TKD, present.float().log_(), is_shared=False)


def _attend(q_TND: Tensor, parts: list[_Part], sink_N: Tensor) -> Tensor:
    """q is scaled already."""
    tokens, heads, width = q_TND.shape
    shared, own = [p for p in parts if p.is_shared], [p for p in parts if not p.is_shared]
    kv_UD = torch.cat((*(p.kv for p in shared), q_TND.new_zeros(1, width)))  # the last row is the sink's
    logit_TNU = (q_TND.reshape(-1, width) @ kv_UD.T).view(tokens, heads, -1)
    begin = 0
    for part in shared:
        logit_TNU[..., begin : begin + len(part.kv)] += part.bias[:, None]
        begin += len(part.kv)
    logit_TNU[..., -1] = sink_N
    if not own:
        return (torch.softmax(logit_TNU, -1).view(tokens * heads, -1) @ kv_UD).view_as(q_TND)
    logits = [logit_TNU, *(torch.baddbmm(p.bias[:, None], q_TND, p.kv.transpose(1, 2)) for p in own)]
    weights = torch.softmax(torch.cat(logits, -1), -1).split([logit.shape[-1] for logit in logits], -1)
    out_TND = (weights[0].reshape(tokens * heads, -1) @ kv_UD).view_as(q_TND)
    for part, weight in zip(own, weights[1:]):
        out_TND.baddbmm_(weight, part.kv)
    return out_TND
