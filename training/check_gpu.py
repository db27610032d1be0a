# SPDX-License-Identifier: Apache-2.0
"""Compares the fast path (FlexAttention, Triton Sinkhorn) with plain torch on random data, forward and backward; prints relative errors."""

from __future__ import annotations

import torch
from torch import Tensor

from training import gpu
from training.model import _top, dense_core, visible
from training.sinkhorn import sinkhorn, sinkhorn_triton


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def main() -> None:
    torch.manual_seed(0)
    comb = torch.softmax(2 * torch.randn(3001, 4, 4, device="cuda"), -1) + 1e-6
    way = torch.randn_like(comb)
    results = []
    for f in (sinkhorn_triton, sinkhorn):
        x = comb.clone().requires_grad_()
        y = f(x, 20, 1e-6)
        (y * way).sum().backward()
        results.append((y.detach(), x.grad))
    print("sinkhorn", *(f"{relative(a, b):.1e}" for a, b in zip(*results, strict=True)))
    for ratio in (0, 1, 2):
        for select in (False, True) if ratio else (False,):
            T = 512
            q0, kv0 = torch.randn(2, T, 8, 64, device="cuda"), torch.randn(2, T, 64, device="cuda")
            e0 = torch.randn(2, T // ratio, 64, device="cuda") if ratio else None
            selection = (
                _top(torch.randn(2, T, T // ratio, device="cuda").masked_fill(~visible(T, ratio, q0.device), -torch.inf), 40)
                if select
                else None
            )
            way_o, way_l = torch.randn(2, T, 8, 64, device="cuda"), torch.randn(2, T, 8, device="cuda")
            results = []
            for core, dtype in ((gpu.flex_core, torch.bfloat16), (dense_core, torch.float32)):
                leaves = [t.bfloat16().to(dtype).clone().requires_grad_() for t in (q0, kv0, e0) if t is not None]
                o, lse = core(leaves[0], leaves[1], leaves[2] if ratio else None, ratio, 128, selection)
                ((o.float() * way_o).sum() + (lse * way_l).sum()).backward()
                results.append((o.detach(), lse.detach(), *(leaf.grad for leaf in leaves)))
            print("attention", ratio, select, *(f"{relative(a, b):.1e}" for a, b in zip(*results, strict=True)))


if __name__ == "__main__":
    main()
