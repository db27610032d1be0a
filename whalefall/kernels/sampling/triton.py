# SPDX-License-Identifier: Apache-2.0
"""Argmax and draw on a GPU: one pass over the logits by several programs a row, then one small program a row.

Score and id travel as one integer key, so that equal scores go to the lower id whatever the order of the programs. The noise of a draw is
made in registers and never stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from whalefall.kernels.registry import Device
from whalefall.kernels.sampling.reference import argmax, draw
from whalefall.kernels.triton_math import INTERPRETED

_GPU = Device(sm=80)
_BLOCK = 4096
_LOWEST = tl.constexpr(-(2**63))


def _is_float32(logits_LV: Tensor) -> bool:
    return logits_LV.dtype == torch.float32 and logits_LV.stride(1) == 1


def _can_draw(logits_LV: Tensor, seed_L: Tensor, position_L: Tensor, purpose: int) -> bool:
    return _is_float32(logits_LV) and seed_L.is_contiguous() and position_L.is_contiguous()


@argmax.impl("triton", needs=_GPU, when=_is_float32)
def argmax_triton(logits_LV: Tensor) -> tuple[Tensor, Tensor]:
    return _best(logits_LV, None, None, 0)


@draw.impl("triton", needs=_GPU, when=_can_draw)
def draw_triton(logits_LV: Tensor, seed_L: Tensor, position_L: Tensor, purpose: int) -> Tensor:
    return _best(logits_LV, seed_L, position_L, purpose)[0]


def _best(logits_LV: Tensor, seed_L: Tensor | None, position_L: Tensor | None, purpose: int) -> tuple[Tensor, Tensor]:
    rows, vocab_size = logits_LV.shape
    ids_L = torch.empty(rows, dtype=torch.int64, device=logits_LV.device)
    best_L = torch.empty(rows, dtype=torch.float32, device=logits_LV.device)
    if not rows:
        return ids_L, best_L
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    parts = max(1, min(32, 528 // rows, triton.cdiv(vocab_size, block)))
    key_LS = torch.empty(rows, parts, dtype=torch.int64, device=logits_LV.device)
    _part_kernel[(rows, parts)](
        logits_LV, seed_L, position_L, key_LS, logits_LV.stride(0), vocab_size, purpose, DRAWS=seed_L is not None, BLOCK=block, num_warps=8
    )
    _merge_kernel[(rows,)](key_LS, ids_L, best_L, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1)
    return ids_L, best_L


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log_noise(seed, position, purpose, ids):
    """log of the exponential number of each id, as `sampling.exponential_noise` defines it."""
    key = _mix64(_mix64(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15) ^ ((position << 8) | purpose).to(tl.uint64, bitcast=True))
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = _mix32(_mix32(ids.to(tl.uint32) * 0x9E3779B9 + low) ^ high)
    uniform = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 0.9999999403953552)
    if INTERPRETED:
        # log1p from log, with the digits that 1 - u loses put back.
        rest = 1.0 - uniform
        lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
        return tl.log(tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / lost)))
    else:
        return libdevice.log(-libdevice.log1p(-uniform))


@triton.jit
def _part_kernel(logits_ptr, seed_ptr, position_ptr, key_ptr, stride, vocab_size, purpose, DRAWS: tl.constexpr, BLOCK: tl.constexpr):
    row, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    best = tl.full((BLOCK,), _LOWEST, tl.int64)
    for first in range(part * BLOCK, vocab_size, num_parts * BLOCK):
        ids = first + tl.arange(0, BLOCK)
        score = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab_size, other=float("-inf"))
        if DRAWS:
            score -= _log_noise(tl.load(seed_ptr + row), tl.load(position_ptr + row), purpose, ids)
        bits = (score + 0.0).to(tl.int32, bitcast=True)
        ordered = tl.where(score != score, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
        key = (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))
        best = tl.maximum(best, tl.where(ids < vocab_size, key, _LOWEST))
    tl.store(key_ptr + row * num_parts + part, tl.max(best, 0))


@triton.jit
def _merge_kernel(key_ptr, ids_ptr, best_ptr, num_parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    key = tl.max(tl.load(key_ptr + row * num_parts + part, mask=part < num_parts, other=_LOWEST), 0)
    ordered = (key >> 32).to(tl.int32)
    tl.store(ids_ptr + row, 0xFFFFFFFF - (key & 0xFFFFFFFF))
    tl.store(best_ptr + row, (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))
