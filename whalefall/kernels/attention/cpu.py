# SPDX-License-Identifier: Apache-2.0
"""The sparse attention on a CPU: tokens that stand together share their keys, so one matrix product replaces many small gathers.

Neighbouring rows of a prompt see almost the same window, and often much the same entries. For a tile of tokens whose lists lie in a narrow
range of rows, the range is scored as a whole and a count per (token, row) says which of the scores belong to the token's list. Lists that
lie far apart (decode, long contexts) are gathered per token, window and entries apart, so that no joined copy is made.
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
    count: Tensor
    """float32 [t, 1, U or K]: how often each row stands in the token's list."""
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
        out_TND[rows] = _attend(q_TND[rows].float(), parts, sink_N, scale)
    return out_TND


def _part(kv_MD: Tensor, index_TK: Tensor) -> _Part:
    tokens, width = index_TK.shape
    if tokens > 1:
        low = int(torch.where(index_TK < 0, kv_MD.shape[0], index_TK).min())
        length = int(index_TK.max()) + 1 - low
        if 0 < length <= _RANGE_FACTOR * width:
            kv_UD = kv_MD[low : low + length].float()
            # A row that is in nobody's list takes part with weight 0; 0 * NaN would be NaN for everybody.
            if bool(kv_UD.isfinite().all()):
                count = torch.zeros(tokens, length + 1)
                count.scatter_add_(1, torch.where(index_TK < 0, length, index_TK - low), torch.ones(()).expand(tokens, width))
                return _Part(kv_UD, count[:, None, :length], is_shared=True)
    # An absent key borrows a row of the same token's list: it has weight 0, and a token's own rows are as finite as the token itself.
    present = index_TK >= 0
    borrowed = index_TK.amax(1, keepdim=True) if width else index_TK
    row = torch.where(present, index_TK, borrowed)
    kv_TKD = kv_MD.index_select(0, row.clamp_min(0).view(-1)).view(tokens, width, kv_MD.shape[1]).float()
    if width and bool((borrowed < 0).any()):
        kv_TKD = kv_TKD.masked_fill((borrowed < 0)[:, :, None], 0)  # a token with an empty list
    return _Part(kv_TKD, present.float()[:, None], is_shared=False)


def _attend(q_TND: Tensor, parts: list[_Part], sink_N: Tensor, scale: float) -> Tensor:
    tokens, heads, width = q_TND.shape
    logits = []
    for part in parts:
        if part.is_shared:
            logit = (q_TND.reshape(-1, width) @ part.kv.T).view(tokens, heads, -1)
        else:
            logit = torch.bmm(q_TND, part.kv.transpose(1, 2))
        logits.append(logit.mul_(scale).masked_fill_(part.count == 0, -torch.inf))
    top_TN1: Tensor = sink_N[None, :, None].expand(tokens, -1, -1)
    for logit in logits:
        if logit.shape[-1]:
            top_TN1 = torch.maximum(top_TN1, logit.amax(-1, keepdim=True))
    total_TN1 = torch.exp(sink_N[None, :, None] - top_TN1)
    for part, logit in zip(parts, logits):
        logit.sub_(top_TN1).exp_()
        if part.is_shared:
            logit.mul_(part.count)
        total_TN1 = total_TN1 + logit.sum(-1, keepdim=True)
    out_TND = torch.zeros_like(q_TND)
    for part, weight in zip(parts, logits):
        weight.div_(total_TN1)
        if part.is_shared:
            out_TND += (weight.view(tokens * heads, -1) @ part.kv).view_as(out_TND)
        else:
            out_TND.baddbmm_(weight, part.kv)
    return out_TND
