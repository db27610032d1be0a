# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn normalisation of the 4x4 stream mixes: plain torch, and on a GPU one Triton kernel for each direction.

y = x / (sum(x) + eps) along alternating axes. Its backward is dx = (dy - sum(dy * y)) / s with s = sum(x) + eps, and x = y * s, so the
backward kernel needs only the sums of every round, which it recomputes into a scratch buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU machine
    triton = None


def sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """comb [..., 4, 4] after softmax over the last axis: columns, then (rows, columns) iterations - 1 times."""
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


if triton is not None:

    @triton.jit
    def _forward(x_ptr, y_ptr, sums_ptr, n, eps, ROUNDS: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        a = tl.arange(0, 4)
        at = t[:, None, None] * 16 + a[None, :, None] * 4 + a[None, None, :]
        ok = (t < n)[:, None, None]
        x = tl.load(x_ptr + at, mask=ok, other=1.0)
        for i in range(ROUNDS):
            if i % 2 == 0:
                s = tl.sum(x, axis=1) + eps
                x = x / s[:, None, :]
            else:
                s = tl.sum(x, axis=2) + eps
                x = x / s[:, :, None]
            if KEEP:
                tl.store(sums_ptr + i * n * 4 + t[:, None] * 4 + a[None, :], s, mask=(t < n)[:, None])
        tl.store(y_ptr + at, x, mask=ok)

    @triton.jit
    def _backward(y_ptr, dy_ptr, dx_ptr, sums_ptr, n, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        a = tl.arange(0, 4)
        at = t[:, None, None] * 16 + a[None, :, None] * 4 + a[None, None, :]
        ok = (t < n)[:, None, None]
        y = tl.load(y_ptr + at, mask=ok, other=1.0)
        d = tl.load(dy_ptr + at, mask=ok, other=0.0)
        for j in range(ROUNDS):
            i = ROUNDS - 1 - j
            s = tl.load(sums_ptr + i * n * 4 + t[:, None] * 4 + a[None, :], mask=(t < n)[:, None], other=1.0)
            if i % 2 == 0:
                d = (d - tl.sum(d * y, axis=1)[:, None, :]) / s[:, None, :]
                y = y * s[:, None, :]
            else:
                d = (d - tl.sum(d * y, axis=2)[:, :, None]) / s[:, :, None]
                y = y * s[:, :, None]
        tl.store(dx_ptr + at, d, mask=ok)

    class _Sinkhorn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, comb: Tensor, iterations: int, eps: float) -> Tensor:
            comb = comb.contiguous()
            ctx.rounds, ctx.eps = 2 * iterations - 1, eps
            n = comb.numel() // 16
            out = torch.empty_like(comb)
            _forward[(triton.cdiv(n, 64),)](comb, out, comb, n, eps, ctx.rounds, False, 64)
            ctx.save_for_backward(comb)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
            (comb,) = ctx.saved_tensors
            n = comb.numel() // 16
            out, dx = torch.empty_like(comb), torch.empty_like(comb)
            sums = torch.empty(ctx.rounds, n, 4, dtype=torch.float32, device=comb.device)
            _forward[(triton.cdiv(n, 64),)](comb, out, sums, n, ctx.eps, ctx.rounds, True, 64)
            _backward[(triton.cdiv(n, 64),)](out, grad.contiguous(), dx, sums, n, ctx.rounds, 64)
            return dx, None, None

    def sinkhorn_triton(comb: Tensor, iterations: int, eps: float) -> Tensor:
        return _Sinkhorn.apply(comb, iterations, eps)
