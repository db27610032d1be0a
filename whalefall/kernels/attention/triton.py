# SPDX-License-Identifier: Apache-2.0
"""The sparse attention on a GPU: a program attends some heads of one token to a share of its keys, gathered row by row.

All heads read the same latent row as key and as value, so a tile of keys is loaded once per program and used in both products. A small
batch would leave most of the card idle: there the list is cut into fixed shares, and a second kernel joins their softmaxes. Grids follow
shapes alone, never what is on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.attention.reference import sparse_mqa
from whalefall.kernels.registry import Device
from whalefall.kernels.triton_math import INTERPRETED, narrow

KEY_TILE = 32
WANTED_PROGRAMS = 264
"""Two per multiprocessor of an H200."""


def _fits(q_TND: Tensor, *_: object, **__: object) -> bool:
    return q_TND.shape[2] <= 512 and q_TND.shape[0] > 0


@sparse_mqa.impl("triton", needs=Device(sm=80), when=_fits)
def sparse_mqa_triton(
    q_TND: Tensor,
    window_kv_MD: Tensor,
    window_index_TW: Tensor,
    main_kv_CD: Tensor | None,
    main_index_TK: Tensor | None,
    sink_N: Tensor,
    scale: float,
) -> Tensor:
    tokens, heads, width = q_TND.shape
    has_main = main_kv_CD is not None and main_index_TK is not None and main_index_TK.shape[1] > 0
    main_kv, main_index = (main_kv_CD, main_index_TK) if has_main else (window_kv_MD, window_index_TW)
    assert main_kv is not None and main_index is not None
    q_TND = q_TND.contiguous()
    num_main = main_index.shape[1] if has_main else 0
    window_tiles, main_tiles = -(-window_index_TW.shape[1] // KEY_TILE), -(-num_main // KEY_TILE)
    head_tile = 16 if tokens <= 32 else 64
    head_tile = min(head_tile, max(16, triton.next_power_of_2(heads)))
    head_tiles = -(-heads // head_tile)
    # Fixed by the shape: the same sums in the same order at every replay.
    splits = max(1, min(window_tiles + main_tiles, WANTED_PROGRAMS // (tokens * head_tiles)))
    per_split = max(1, -(-(window_tiles + main_tiles) // splits))
    out_TND = torch.empty_like(q_TND)
    padded = max(16, triton.next_power_of_2(width))
    if splits > 1:
        part = torch.empty(splits, tokens, heads, width, dtype=torch.float32, device=q_TND.device)
        state = torch.empty(2, splits, tokens, heads, dtype=torch.float32, device=q_TND.device)
    else:
        part = state = sink_N  # not touched
    _attend_kernel[(tokens, head_tiles, splits)](
        q_TND, window_kv_MD, window_index_TW, main_kv, main_index, sink_N, out_TND, part, state,
        scale, tokens, heads, width, window_index_TW.shape[1], num_main, per_split,
        window_kv_MD.stride(0), window_index_TW.stride(0), main_kv.stride(0), main_index.stride(0),
        WIDTH=padded, HEADS=head_tile, KEYS=KEY_TILE, IS_SPLIT=splits > 1,
        num_warps=8 if head_tile == 64 or padded >= 512 else 4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(tokens, heads)](
            part, state, sink_N, out_TND, tokens, heads, width, splits,
            WIDTH=padded, SPLITS=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return out_TND


@triton.jit
def _product(a, b):
    """float32 a @ b; float32 operands are not rounded to a narrower type first."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _tiles(
    q, top, total, acc, kv_ptr, index_ptr, kv_stride, num_keys, first, last, width, scale,
    WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Take tiles [first, last) of one list into the running softmax of [HEADS] rows."""
    column = tl.arange(0, WIDTH)
    for tile in range(first, last):
        key = tile * KEYS + tl.arange(0, KEYS)
        row = tl.load(index_ptr + key, mask=key < num_keys, other=-1)
        is_there = row >= 0
        kv = tl.load(
            kv_ptr + tl.maximum(row, 0)[:, None] * kv_stride + column[None, :],
            mask=is_there[:, None] & (column < width)[None, :],
            other=0.0,
        )
        logit = tl.where(is_there[None, :], _product(q, tl.trans(kv)) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(logit, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key yet: exp(-inf - -inf) would be NaN
        weight = tl.exp(logit - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + _product(narrow(weight, kv.dtype), kv)
        top = higher
    return top, total, acc


@triton.jit
def _attend_kernel(
    q_ptr, window_ptr, window_index_ptr, main_ptr, main_index_ptr, sink_ptr, out_ptr, part_ptr, state_ptr,
    scale, tokens, heads, width, num_window, num_main, per_split,
    window_stride, window_index_stride, main_stride, main_index_stride,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    is_head = head < heads
    place = (token * heads + head)[:, None] * width + column[None, :]
    is_place = is_head[:, None] & (column < width)[None, :]
    q = tl.load(q_ptr + place, mask=is_place, other=0.0)
    window_tiles = tl.cdiv(num_window, KEYS)
    first, last = split * per_split, tl.minimum((split + 1) * per_split, window_tiles + tl.cdiv(num_main, KEYS))
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, WIDTH), tl.float32)
    top, total, acc = _tiles(
        q, top, total, acc, window_ptr, window_index_ptr + token * window_index_stride, window_stride, num_window,
        first, tl.minimum(last, window_tiles), width, scale, WIDTH, KEYS,
    )  # fmt: skip
    top, total, acc = _tiles(
        q, top, total, acc, main_ptr, main_index_ptr + token * main_index_stride, main_stride, num_main,
        tl.maximum(first, window_tiles) - window_tiles, last - window_tiles, width, scale, WIDTH, KEYS,
    )  # fmt: skip
    if IS_SPLIT:
        rows = (token * 0 + tokens) * heads  # 64 bits wide; a size of 1 is a constant and has no method .to
        tl.store(part_ptr + split * rows * width + place, acc, mask=is_place)
        tl.store(state_ptr + split * rows + token * heads + head, top, mask=is_head)
        tl.store(state_ptr + (tl.num_programs(2) + split) * rows + token * heads + head, total, mask=is_head)
    else:
        sink = tl.load(sink_ptr + head, mask=is_head, other=0.0)
        highest = tl.maximum(top, sink)
        shrink = tl.exp(top - highest)
        total = total * shrink + tl.exp(sink - highest)
        tl.store(out_ptr + place, narrow(acc * (shrink / total)[:, None], out_ptr.dtype.element_ty), mask=is_place)


@triton.jit
def _join_kernel(
    part_ptr, state_ptr, sink_ptr, out_ptr, tokens, heads, width, splits, WIDTH: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, row = (token * 0 + tokens) * heads, token * heads + head
    column, split = tl.arange(0, WIDTH), tl.arange(0, SPLITS)
    is_split = split < splits
    top = tl.load(state_ptr + split * rows + row, mask=is_split, other=float("-inf"))
    total = tl.load(state_ptr + (splits + split) * rows + row, mask=is_split, other=0.0)
    sink = tl.load(sink_ptr + head)
    highest = tl.maximum(tl.max(top, 0), sink)
    share = tl.exp(top - highest)
    part = tl.load(
        part_ptr + (split * rows + row)[:, None] * width + column[None, :],
        mask=is_split[:, None] & (column < width)[None, :],
        other=0.0,
    )
    joined = tl.sum(part * share[:, None], 0) / (tl.sum(total * share, 0) + tl.exp(sink - highest))
    tl.store(out_ptr + row * width + column, narrow(joined, out_ptr.dtype.element_ty), mask=column < width)
