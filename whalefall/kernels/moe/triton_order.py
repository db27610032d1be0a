# SPDX-License-Identifier: Apache-2.0
"""Rows in order of their expert, cut into tiles of one expert each, without asking the host how many there are.

The grid of the products is the largest number of tiles that this many rows could make; tiles beyond the real number hold expert -1 and
their programs end at once. The same launch also splits the activations into even and odd columns, as packed FP4 weights want them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.quant.unpack import places
from whalefall.kernels.triton_math import power_of_two


@dataclass(frozen=True, slots=True)
class Order:
    """R = token-expert pairs; a pair is token * A + place among the token's experts."""

    pair_R: Tensor
    """int32, pairs sorted by expert, then by pair; pairs without an expert (id < 0) are left out at the end."""
    tiles_X3: Tensor
    """int32: expert (-1: nothing to do), first row, end row of each tile."""
    x_T2h: Tensor
    """The activations with even columns first, float16 [T, 2, H / 2], times a power of two for each token."""
    factor_T: Tensor
    """What undoes that power of two; float32."""


def max_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """The most tiles that the pairs can make, however they fall."""
    return min(num_pairs, num_experts + num_pairs // tile)


def order_by_expert(x_TH: Tensor, expert_TA: Tensor, num_experts: int, tile: int, *, in_places: bool) -> Order:
    """Needs an H of whole groups of 32 and unit column strides; `in_places` orders the columns of a group by `places`.

    Each token is brought to magnitudes below 2**15: as float16 nothing overflows, and all that is not tiny beside the token's largest value
    keeps more digits than bfloat16 had.
    """
    num_pairs, (tokens, hidden) = expert_TA.numel(), x_TH.shape
    pair_R = torch.empty(num_pairs, dtype=torch.int32, device=x_TH.device)
    tiles_X3 = torch.empty(max_tiles(num_pairs, num_experts, tile), 3, dtype=torch.int32, device=x_TH.device)
    x_T2h = torch.empty(tokens, 2, hidden // 2, dtype=torch.float16, device=x_TH.device)
    factor_T = torch.empty(tokens, dtype=torch.float32, device=x_TH.device)
    block = min(2048, max(32, triton.next_power_of_2(num_pairs)))
    _order_kernel[(num_experts,)](
        expert_TA.contiguous(),
        pair_R,
        tiles_X3,
        x_TH,
        x_T2h,
        factor_T,
        num_pairs,
        tiles_X3.shape[0],
        tokens,
        x_TH.stride(0),
        NUM_EXPERTS=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        TILE=tile,
        BLOCK=block,
        HIDDEN=hidden,
        COLUMNS=min(2048, triton.next_power_of_2(hidden)),
        IN_PLACES=in_places,
        num_warps=4 if block <= 1024 else 8,
    )
    return Order(pair_R, tiles_X3, x_T2h, factor_T)


@triton.jit
def _load_experts(expert_ptr, pair, num_pairs, NONE: tl.constexpr):
    expert = tl.load(expert_ptr + pair, mask=pair < num_pairs, other=NONE).to(tl.int32)
    return tl.where(expert < 0, NONE, expert)


@triton.jit
def _order_kernel(
    expert_ptr,
    pair_ptr,
    tiles_ptr,
    x_ptr,
    split_ptr,
    factor_ptr,
    num_pairs,
    num_tiles,
    tokens,
    x_stride,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    IN_PLACES: tl.constexpr,
):
    """One program per expert. Each counts all experts for itself: nobody waits for anybody."""
    mine = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        expert = _load_experts(expert_ptr, first + tl.arange(0, BLOCK), num_pairs, BINS - 1)
        counts += tl.histogram(expert, BINS)
    counts = tl.where(bins < NUM_EXPERTS, counts, 0)
    tiles = (counts + TILE - 1) // TILE
    begin = tl.sum(tl.where(bins < mine, counts, 0))
    count = tl.sum(tl.where(bins == mine, counts, 0))
    first_tile = tl.sum(tl.where(bins < mine, tiles, 0))

    row = begin
    if count > 0:
        for first in range(0, num_pairs, BLOCK):
            pair = first + tl.arange(0, BLOCK)
            is_mine = _load_experts(expert_ptr, pair, num_pairs, BINS - 1) == mine
            place = tl.cumsum(is_mine.to(tl.int32), 0)
            tl.store(pair_ptr + row + place - 1, pair, mask=is_mine)
            row += tl.sum(is_mine.to(tl.int32))

    lane = tl.arange(0, 32)
    for first in range(0, (count + TILE - 1) // TILE, 32):
        tile = first + lane
        is_tile = tile * TILE < count
        to = tiles_ptr + (first_tile + tile) * 3
        tl.store(to, tl.zeros_like(tile) + mine, mask=is_tile)
        tl.store(to + 1, begin + tile * TILE, mask=is_tile)
        tl.store(to + 2, begin + tl.minimum((tile + 1) * TILE, count), mask=is_tile)
    for first in range(tl.sum(tiles) + mine * 32, num_tiles, NUM_EXPERTS * 32):
        tl.store(tiles_ptr + (first + lane) * 3, tl.full((32,), -1, tl.int32), mask=first + lane < num_tiles)

    for token in range(mine, tokens, NUM_EXPERTS):
        token_wide = tl.zeros((1,), tl.int64) + token
        _split_row(x_ptr + token_wide * x_stride, split_ptr + token_wide * HIDDEN, factor_ptr + token_wide, HIDDEN, COLUMNS, IN_PLACES)


@triton.jit
def _split_row(x_ptr, split_ptr, factor_ptr, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, IN_PLACES: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    half = tl.arange(0, COLUMNS // 2)
    size = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, HIDDEN, COLUMNS):
        size = tl.maximum(size, tl.abs(tl.load(x_ptr + first + column, mask=first + column < HIDDEN, other=0.0).to(tl.float32)))
    largest = tl.max(size, 0)
    exponent = tl.where(largest > 0, 14 - ((largest.to(tl.int32, bitcast=True) >> 23) - 127), 0)
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    tl.store(factor_ptr + tl.zeros((1,), tl.int32), tl.zeros((1,), tl.float32) + power_of_two(-exponent))
    for first in range(0, HIDDEN, COLUMNS):
        x = tl.load(x_ptr + first + column, mask=first + column < HIDDEN, other=0.0).to(tl.float32) * power_of_two(exponent)
        even, odd = tl.split(tl.reshape(x.to(tl.float16), (COLUMNS // 2, 2)))
        to = split_ptr + first // 2 + (places(half) if IN_PLACES else half)
        tl.store(to, even, mask=first // 2 + half < HIDDEN // 2)
        tl.store(to + HIDDEN // 2, odd, mask=first // 2 + half < HIDDEN // 2)
