# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - one table of names is wider than the page
"""Muon for the matrices and Adam for the rest, on float32 masters; the model's own parameters hold the (optionally quantised) copies.

Quantisation-aware training is one flag here: after each update the model gets masters rounded to the formats of the checkpoint, and the
gradient taken at the rounded point moves the masters (straight through). The model's graph never knows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from whalefall.kernels.quant import reference as q

FLAT_WIDTH = 32


def rounded(value: Tensor, fmt: str) -> Tensor:
    """float32 values after a round trip through a storage format; leading dims are independent matrices."""
    flat = value.flatten(0, -2)
    if fmt == "fp8":
        flat = q.dequantize_fp8_tile(*q.quantize_fp8_tile(flat), torch.float32)
    elif fmt == "fp4":
        flat = _rounded_mxfp4(flat)
    elif fmt == "row":
        flat = q.dequantize_fp8_row(*q.quantize_fp8_row(flat), torch.float32)
    elif fmt == "bf16":
        flat = flat.bfloat16().float()
    return flat.view_as(value)


def _rounded_mxfp4(x: Tensor) -> Tensor:
    """As quantize_mxfp4 and back, from arithmetic alone: no table and no check that waits for the device, so a CUDA graph can hold it."""
    groups = x.unflatten(-1, (-1, 32))
    scale = q._power_of_two(q._exponent_ceil(groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / q.E2M1_MAX))
    scaled = groups / scale
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (torch.round(scaled / step) * step * scale).flatten(-2)  # ties go to the even multiple, which has the even code


def orthogonalise(g: Tensor) -> Tensor:
    """Newton-Schulz: the nearest (semi-)orthogonal matrix, roughly, of each matrix of a batch."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for a, b, c in ((3.4445, -4.7750, 2.0315),) * 5:
        m = x @ x.mT
        x = a * x + (b * m + c * (m @ m)) @ x
    return (x.mT if tall else x).float()


class _Group:
    def __init__(self, names: list[str], parameters: list[nn.Parameter], fmt: str, lr: float) -> None:
        self.names, self.parameters, self.fmt, self.lr = names, parameters, fmt, lr
        self.master = self.gather([p.detach() for p in parameters])

    def write(self, quantise: bool) -> None:
        values = rounded(self.master, self.fmt) if quantise else self.master
        torch._foreach_copy_([p.data for p in self.parameters], self.spread(values))

    def gradient(self) -> Tensor:
        """A gradient that is no number moves nothing: one bad row must not end a run."""
        return torch.nan_to_num(self.gather([p.grad for p in self.parameters]), 0.0, 0.0, 0.0)  # type: ignore[misc]

    def gather(self, tensors: list[Tensor]) -> Tensor:
        raise NotImplementedError

    def spread(self, values: Tensor) -> list[Tensor]:
        raise NotImplementedError


class MuonGroup(_Group):
    """Matrices of one shape and format, stacked [G, n, k]."""

    def __init__(self, *args) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args)
        self.momentum = torch.zeros_like(self.master)

    def gather(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([split_matrices(n, t).float() for n, t in zip(self.names, tensors, strict=True)])

    def spread(self, values: Tensor) -> list[Tensor]:
        parts = values.split([split_matrices(n, p).shape[0] for n, p in zip(self.names, self.parameters, strict=True)])
        return [part.reshape(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def step(self, scale: Tensor, weight_decay: float) -> None:
        g = self.gradient()
        self.momentum.mul_(0.95).add_(g)
        update = ORTHOGONALISE(g.add(self.momentum, alpha=0.95))
        n, k = self.master.shape[-2:]
        lr = self.lr * scale
        self.master.mul_(1 - lr * weight_decay).sub_(update * (lr * max(1.0, n / k) ** 0.5))


ORTHOGONALISE: Callable[[Tensor], Tensor] = orthogonalise


def split_matrices(name: str, t: Tensor) -> Tensor:
    """[matrices, n, k]: experts apart, gate and up projection apart."""
    if name.endswith("experts.w13"):
        return t.unflatten(1, (2, -1)).flatten(0, 1)
    return t if t.dim() == 3 else t.unsqueeze(0)


class AdamGroup(_Group):
    """Everything of one learning rate, flat."""

    def __init__(self, *args) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args)
        self.m, self.v = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.count = torch.zeros((), device=self.master.device)

    def gather(self, tensors: list[Tensor]) -> Tensor:
        flat = torch.cat([t.float().flatten() for t in tensors])
        return flat.view(-1, FLAT_WIDTH) if self.fmt == "row" else flat.view(-1, 1)

    def spread(self, values: Tensor) -> list[Tensor]:
        parts = values.flatten().split([p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    def step(self, scale: Tensor, weight_decay: float) -> None:
        g = self.gradient()
        self.count += 1
        self.m.lerp_(g, 0.1)
        self.v.lerp_(g.square(), 0.02)
        m, v = self.m / (1 - 0.9**self.count), self.v / (1 - 0.98**self.count)
        self.master.sub_(m / (v.sqrt() + 1e-10) * (self.lr * scale))


ADAM_RATES = (
    ("engram.embed", 5e-3), ("markov_head.embed", 3e-3), ("markov_head.head", 2e-3), ("confidence", 1e-3), ("embed", 5e-3), ("head", 2e-3), ("hc_attn_fn", 5e-4), ("hc_ffn_fn", 5e-4),
    ("_base", 5e-3), ("_scale", 3e-3), ("indexer", 2e-3), ("gate.weight", 2e-3), ("attn_sink", 1e-2), ("", 3e-3),
)  # fmt: skip
"""First name that is part of the parameter's name decides its Adam rate; matrices not named here belong to Muon."""
MUON_RATE = 0.02


class Optimiser:
    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], quantise: bool = False) -> None:
        muon, adam = defaultdict(list), defaultdict(list)
        for name, p in parameters:
            if not p.requires_grad:
                continue
            fmt = getattr(p, "fmt", "fp32")
            rate_of = next(part for part, _ in ADAM_RATES if part in name)
            if p.dim() >= 2 and rate_of == "":
                shape = split_matrices(name, p).shape[1:] if "engram" not in name or "wkv" in name else p.shape
                (muon if fmt != "fp32" else adam)[(fmt, tuple(shape) if fmt != "fp32" else 3e-3)].append((name, p))
            else:
                adam[(fmt, dict(ADAM_RATES)[rate_of])].append((name, p))
        self.groups: list[MuonGroup | AdamGroup] = []
        for (fmt, _), members in muon.items():
            self.groups.append(MuonGroup([n for n, _ in members], [p for _, p in members], fmt, MUON_RATE))
        for (fmt, rate), members in adam.items():
            self.groups.append(AdamGroup([n for n, _ in members], [p for _, p in members], fmt, rate))
        self.quantise = quantise

    @torch.no_grad()
    def step(self, scale: Tensor | float, weight_decay: float = 0.05) -> None:
        """scale: share of every learning rate; a tensor on the device lets a CUDA graph replay the step."""
        scale = torch.as_tensor(scale)
        for group in self.groups:
            for p in group.parameters:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            group.step(scale, weight_decay)
            group.write(self.quantise)
            for p in group.parameters:
                p.grad = None

    @torch.no_grad()
    def set_quantise(self, on: bool) -> None:
        self.quantise = on
        for group in self.groups:
            group.write(on)

    def masters(self) -> dict[str, Tensor]:
        return {name: value for group in self.groups for name, value in zip(group.names, group.spread(group.master), strict=True)}

    @torch.no_grad()
    def load_masters(self, values: dict[str, Tensor]) -> None:
        for group in self.groups:
            device = group.master.device
            group.master.copy_(group.gather([values[n].to(device).view_as(p) for n, p in zip(group.names, group.parameters, strict=True)]))
            group.write(self.quantise)

    def load_moments(self, values: list[Tensor]) -> None:
        for have, saved in zip(self.moments(), values, strict=True):
            have.copy_(saved)
        for group in self.groups:
            if isinstance(group, AdamGroup):
                group.count.fill_(1000)  # averages that were saved need no correction for their start

    def moments(self) -> list[Tensor]:
        return [t for g in self.groups for t in ((g.momentum,) if isinstance(g, MuonGroup) else (g.m, g.v))]
