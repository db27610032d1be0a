# SPDX-License-Identifier: Apache-2.0
"""The sparse attention on a CPU: tokens that stand together share their keys, so one matrix product replaces many small gathers.

Neighbouring rows of a prompt see almost the same window, and often much the same entries. For a tile of tokens whose lists lie in a narrow
range of rows, the range is scored as a whole and a bias per (token, row), 0 or minus infinity, says which of the scores count. Lists that
lie far apart (decode, long contexts) are copied per token, window and entries apart, so that no joined copy is made: as one run of rows
where a list is a run (a ring in decode), else row by row. The sink is one more key, of zeros: then a single softmax does all.
Benchmark: benchmarks/kernels/cpu_attention.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from whalefall.kernels.attention.reference import sparse_mqa
from whalefall.kernels.registry import Device

_TILE_TOKENS = 64
_TILE_BYTES = 8 << 20
"""Gathered keys of one tile; stays near a core's cache."""
_RANGE_FACTOR = 4
"""A range this many times longer than a list is still scored faster than the list is gathered."""
_SPAN_FACTOR = 2
"""A token's own range this many times longer than its list is still copied faster as one run than row by row."""


@dataclass(slots=True)
class _Part:
    """One list of a tile, ready to score: keys shared by the tile ([U, D]) or each token's own ([t, K, D])."""

    kv: Tensor
    bias: Tensor
    """float32 [t, U or K]: added to the scores; 0 where the row stands in the token's list, -inf elsewhere."""
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
    for rows in _tiles(window_index_TW, tile):
        parts = [_part(kv, index[rows]) for kv, index in lists]
        out_TND[rows] = _attend(q_TND[rows].float() * scale, parts, sink_N)
    return out_TND


def _tiles(window_index_TW: Tensor, tile: int) -> Iterator[slice]:
    """Runs of at most `tile` tokens that end where a window starts anew: two requests have no range of entries in common."""
    tokens, width = window_index_TW.shape
    borders: list[int] = []
    if width and tokens > tile:
        first_T = window_index_TW.masked_fill(window_index_TW < 0, torch.iinfo(torch.int64).max).amin(1)
        borders = (first_T.diff() > 1).nonzero().flatten().add_(1).tolist()  # within a request it slides by one row at most
    if len(borders) > tokens // 32:
        borders = []  # decode rows: each is a request of its own
    for begin, end in pairwise((0, *borders, tokens)):
        pieces = -(-(end - begin) // tile)
        for piece in range(pieces):
            yield slice(begin + (end - begin) * piece // pieces, begin + (end - begin) * (piece + 1) // pieces)


def _part(kv_MD: Tensor, index_TK: Tensor) -> _Part:
    tokens, width = index_TK.shape
    if tokens > 1:
        first_T = torch.where(index_TK < 0, kv_MD.shape[0], index_TK).amin(1)
        last_T = index_TK.amax(1)
        low, span = int(first_T.min()), int((last_T - first_T).max()) + 1
        length = int(last_T.max()) + 1 - low
        if 0 < length <= _RANGE_FACTOR * width:
            kv_UD = kv_MD[low : low + length].float()
            # A row that is in nobody's list takes part with weight 0; 0 * NaN would be NaN for everybody.
            if _is_finite(kv_UD):
                return _Part(kv_UD, _bias(index_TK - low, length), is_shared=True)
        if 0 < span <= _SPAN_FACTOR * width and span <= kv_MD.shape[0] and kv_MD.is_contiguous():
            begin_T = first_T.clamp(0, kv_MD.shape[0] - span)
            runs = kv_MD.as_strided((kv_MD.shape[0] - span + 1, span * kv_MD.shape[1]), (kv_MD.shape[1], 1))
            kv_TKD = runs.index_select(0, begin_T).view(tokens, span, kv_MD.shape[1]).float()
            if _is_finite(kv_TKD):
                return _Part(kv_TKD, _bias(index_TK - begin_T[:, None], span), is_shared=False)
    # An absent key borrows a row of the same token's list: it has weight 0, and a token's own rows are as finite as the token itself.
    present = index_TK >= 0
    borrowed = index_TK.amax(1, keepdim=True) if width else index_TK
    row = torch.where(present, index_TK, borrowed)
    kv_TKD = kv_MD.index_select(0, row.clamp_min(0).view(-1)).view(tokens, width, kv_MD.shape[1]).float()
    if width and bool((borrowed < 0).any()):
        kv_TKD = kv_TKD.masked_fill((borrowed < 0)[:, :, None], 0)  # a token with an empty list
    return _Part(kv_TKD, present.float().log_(), is_shared=False)


def _bias(offset_TK: Tensor, length: int) -> Tensor:
    """float32 [T, length]: 0 where the row stands in the token's list, -inf elsewhere; a negative offset is an absent key."""
    bias_TU = torch.full((offset_TK.shape[0], length + 1), -torch.inf)
    return bias_TU.scatter_(1, torch.where(offset_TK < 0, length, offset_TK), 0.0)[:, :length]


def _is_finite(rows: Tensor) -> bool:
    return bool(rows.sum().isfinite())


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
