# SPDX-License-Identifier: Apache-2.0
"""The hyper-connections on a GPU: mixes in two launches, collapse and expand in one each.

`mixes` is a narrow product over a long row (24 x 20,480 at the released size): one launch cuts the row into shares so that few tokens
still fill the card, and takes the sum of squares along; the other adds the shares up and does norm, sigmoids and all Sinkhorn rounds in
registers, where plain torch needs about fifty launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalefall.kernels.mhc.reference import collapse, expand, mixes
from whalefall.kernels.registry import Device
from whalefall.kernels.triton_math import INTERPRETED, narrow

GPU = Device(sm=80)
TOKEN_TILE, ROW_TILE, LONG_TILE = 16, 32, 128
WANTED_PROGRAMS = 264
HIDDEN_TILE = 1024


def _is_narrow(streams_TSH: Tensor, fn_MF: Tensor, *_: object, **__: object) -> bool:
    return streams_TSH.shape[1] in (2, 4) and fn_MF.shape[0] <= ROW_TILE and streams_TSH.shape[0] > 0


@mixes.impl("triton", needs=GPU, when=_is_narrow)
def mixes_triton(
    streams_TSH: Tensor, fn_MF: Tensor, base_M: Tensor, scale_3: Tensor, eps: float, hc_eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, streams, _ = streams_TSH.shape
    flat_TF, num_rows = streams_TSH.flatten(1).contiguous(), fn_MF.shape[0]
    token_tile = TOKEN_TILE if tokens <= 64 else 64
    length, token_tiles = flat_TF.shape[1], -(-tokens // token_tile)
    tiles = triton.cdiv(length, LONG_TILE)
    shares = max(1, min(WANTED_PROGRAMS // token_tiles, tiles))
    per_share = triton.cdiv(tiles, shares) * LONG_TILE
    shares = -(-length // per_share)
    # The last row of a share is the sum of squares.
    part = torch.empty(shares, tokens, num_rows + 1, dtype=torch.float32, device=flat_TF.device)
    _product_kernel[(token_tiles, shares)](
        flat_TF, fn_MF, part, tokens, length, num_rows, per_share, fn_MF.stride(0),
        TOKENS=token_tile, ROWS=ROW_TILE, LONG=LONG_TILE, num_warps=4, num_stages=3,
    )  # fmt: skip
    new = flat_TF.new_empty
    pre_TS, post_TS = (new(tokens, streams, dtype=torch.float32) for _ in range(2))
    comb_TSS = new(tokens, streams, streams, dtype=torch.float32)
    _sinkhorn_kernel[(tokens,)](
        part, base_M, scale_3, pre_TS, post_TS, comb_TSS, tokens, length, num_rows, shares, eps, hc_eps, iterations,
        STREAMS=streams, SHARES=triton.next_power_of_2(shares), num_warps=1 if shares <= 64 else 4,
    )  # fmt: skip
    return pre_TS, post_TS, comb_TSS


@triton.jit
def _product_kernel(
    x_ptr, fn_ptr, part_ptr, tokens, length, num_rows, per_share, fn_stride,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    share = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, ROWS)
    is_token, is_row = token < tokens, row < num_rows
    acc = tl.zeros((TOKENS, ROWS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for begin in range(0, per_share, LONG):
        column = share * per_share + begin + tl.arange(0, LONG)
        is_column = column < length
        x = tl.load(x_ptr + token[:, None] * length + column[None, :], mask=is_token[:, None] & is_column[None, :], other=0.0)
        fn = tl.load(fn_ptr + row[None, :] * fn_stride + column[:, None], mask=is_row[None, :] & is_column[:, None], other=0.0)
        x32 = x.to(tl.float32)
        squares += tl.sum(x32 * x32, 1)
        if INTERPRETED:
            acc += tl.dot(x32, fn)
        elif x.dtype == tl.bfloat16:
            # A float32 is three bfloat16 numbers: products on the matrix units, and no bit of the matrix lost.
            high = fn.to(tl.bfloat16)
            rest = fn - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(x, high, tl.dot(x, middle, tl.dot(x, low, acc)))
        else:
            acc = tl.dot(x32, fn, acc, input_precision="ieee")
    place = part_ptr + (share * tokens + token) * (num_rows + 1)
    tl.store(place[:, None] + row[None, :], acc, mask=is_token[:, None] & is_row[None, :])
    tl.store(place + num_rows, squares, mask=is_token)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def _sinkhorn_kernel(
    part_ptr, base_ptr, scale_ptr, pre_ptr, post_ptr, comb_ptr, tokens, length, num_rows, shares, eps, hc_eps, iterations,
    STREAMS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, SHARES)
    is_share = share < shares
    line = part_ptr + (share.to(tl.int64) * tokens + token) * (num_rows + 1)
    squares = tl.sum(tl.load(line + num_rows, mask=is_share, other=0.0), 0)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(squares / length + eps))
    stream = tl.arange(0, STREAMS)
    few = line[:, None] + stream[None, :]
    pre = tl.sum(tl.load(few, mask=is_share[:, None], other=0.0), 0) * inverse
    post = tl.sum(tl.load(few + STREAMS, mask=is_share[:, None], other=0.0), 0) * inverse
    pre = _sigmoid(pre * tl.load(scale_ptr) + tl.load(base_ptr + stream)) + hc_eps
    post = 2.0 * _sigmoid(post * tl.load(scale_ptr + 1) + tl.load(base_ptr + STREAMS + stream))
    tl.store(pre_ptr + token * STREAMS + stream, pre)
    tl.store(post_ptr + token * STREAMS + stream, post)
    cell = stream[:, None] * STREAMS + stream[None, :]  # [from, to]
    many = tl.load(line[:, None, None] + 2 * STREAMS + cell[None, :, :], mask=is_share[:, None, None], other=0.0)
    comb = tl.sum(many, 0) * inverse * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * STREAMS + cell)
    comb = tl.exp(comb - tl.max(comb, 1)[:, None])
    comb = comb / tl.sum(comb, 1)[:, None] + hc_eps
    comb = comb / (tl.sum(comb, 0)[None, :] + hc_eps)
    for _ in range(1, iterations):
        comb = comb / (tl.sum(comb, 1)[:, None] + hc_eps)
        comb = comb / (tl.sum(comb, 0)[None, :] + hc_eps)
    tl.store(comb_ptr + token * STREAMS * STREAMS + cell, comb)


@collapse.impl("triton", needs=GPU, when=lambda streams_TSH, carry_TS: streams_TSH.shape[1] in (2, 4) and streams_TSH.shape[0] > 0)
def collapse_triton(streams_TSH: Tensor, carry_TS: Tensor) -> Tensor:
    tokens, streams, hidden = streams_TSH.shape
    out_TH = torch.empty(tokens, hidden, dtype=streams_TSH.dtype, device=streams_TSH.device)
    _collapse_kernel[(tokens, -(-hidden // HIDDEN_TILE))](
        streams_TSH, carry_TS.contiguous(), out_TH, hidden, *streams_TSH.stride(), STREAMS=streams, HIDDEN=HIDDEN_TILE, num_warps=4
    )
    return out_TH


@triton.jit
def _collapse_kernel(
    x_ptr, carry_ptr, out_ptr, hidden, token_stride, stream_stride, column_stride, STREAMS: tl.constexpr, HIDDEN: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column, stream = tl.program_id(1) * HIDDEN + tl.arange(0, HIDDEN), tl.arange(0, STREAMS)
    is_column = column < hidden
    carry = tl.load(carry_ptr + token * STREAMS + stream)
    place = token * token_stride + stream[:, None] * stream_stride + column[None, :] * column_stride
    x = tl.load(x_ptr + place, mask=is_column[None, :], other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden + column, narrow(tl.sum(x * carry[:, None], 0), out_ptr.dtype.element_ty), mask=is_column)


@expand.impl(
    "triton",
    needs=GPU,
    when=lambda streams_TSH, y_TH, post_TS, comb_TSS: streams_TSH.shape[1] in (2, 4) and streams_TSH.shape[0] > 0,
)
def expand_triton(streams_TSH: Tensor, y_TH: Tensor, post_TS: Tensor, comb_TSS: Tensor) -> Tensor:
    tokens, streams, hidden = streams_TSH.shape
    out_TSH = torch.empty(tokens, streams, hidden, dtype=streams_TSH.dtype, device=streams_TSH.device)
    _expand_kernel[(tokens, -(-hidden // HIDDEN_TILE))](
        streams_TSH, y_TH.contiguous(), post_TS.contiguous(), comb_TSS.contiguous(), out_TSH, hidden, *streams_TSH.stride(),
        STREAMS=streams, HIDDEN=HIDDEN_TILE, num_warps=4,
    )  # fmt: skip
    return out_TSH


@triton.jit
def _expand_kernel(
    x_ptr, y_ptr, post_ptr, comb_ptr, out_ptr, hidden, token_stride, stream_stride, column_stride,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column, stream = tl.program_id(1) * HIDDEN + tl.arange(0, HIDDEN), tl.arange(0, STREAMS)
    is_column = column < hidden
    post = tl.load(post_ptr + token * STREAMS + stream)
    y = tl.load(y_ptr + token * hidden + column, mask=is_column, other=0.0).to(tl.float32)
    out = post[:, None] * y[None, :]
    for source in tl.static_range(STREAMS):
        comb = tl.load(comb_ptr + (token * STREAMS + source) * STREAMS + stream)
        place = token * token_stride + source * stream_stride + column * column_stride
        out += comb[:, None] * tl.load(x_ptr + place, mask=is_column, other=0.0).to(tl.float32)[None, :]
    target = (token * STREAMS + stream)[:, None] * hidden + column[None, :]
    tl.store(out_ptr + target, narrow(out, out_ptr.dtype.element_ty), mask=is_column[None, :])
