# SPDX-License-Identifier: Apache-2.0
"""How results of an op are compared: with the truth, and a twin with the reference.

Decisions (ids, counts, masks, stored bytes) compare exactly. Floats compare by their error against a float64 truth: a twin may err at most
`factor` times as much as plain torch does in the same dtype, or by one rounding of the result. Errors are taken row by row, relative to the
largest entry of the row, so that small rows count as much as large ones. Tolerances do not grow to make a test pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

REFERENCE_LIMIT = {torch.float32: 2e-5, torch.bfloat16: 2.5 * 2**-7, torch.float16: 2.5 * 2**-10}
"""Largest error of a reference itself: sums of a few thousand float32 terms, or two roundings to a narrow type."""


class Mismatch(AssertionError):
    """Two results differ by more than they may."""


def run(fn: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    """What a call gives back and what it leaves in its arguments: all tensors of both, so that writing where one should not is seen."""
    result = fn(*args)
    outputs = () if result is None else result if isinstance(result, tuple) else (result,)
    return [tensor for tensor in (*outputs, *args) if isinstance(tensor, Tensor)]


def to_device(args: Sequence[Any], device: torch.device) -> tuple[Any, ...]:
    """Copies of the arguments that keep their strides."""
    return tuple(_to_device(arg, device) if isinstance(arg, Tensor) else arg for arg in args)


def error(actual: Tensor, truth: Tensor) -> float:
    """Largest error of any row relative to the row's largest entry; infinite where one is NaN or infinite and the other is not equal."""
    a, t = actual.double(), truth.double()
    if not a.numel():
        return 0.0
    same = (a == t) | (a.isnan() & t.isnan())
    gap = torch.where(same, 0.0, (a - t).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    if a.dim() == 0:
        gap, t = gap[None], t[None]
    size = t.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float((gap.amax(-1) / size).max())


def check_reference(results: Sequence[Tensor], truth: Sequence[Tensor], limit: float | None = None) -> None:
    """A reference against an independent float64 account of the op.

    Raises:
        Mismatch: names the tensor, the error and the limit.
    """
    _check_shapes(results, truth)
    for i, (found, true) in enumerate(zip(results, truth)):
        if not found.is_floating_point() or found.dtype == torch.float8_e4m3fn:
            _check_exact(i, found, true)
            continue
        allowed = limit if limit is not None else REFERENCE_LIMIT[found.dtype]
        if not error(found, true) <= allowed:
            raise Mismatch(f"tensor {i}, {found.dtype}: error {error(found, true):.3g}, limit {allowed:.3g}")


def vs_torch(factor: float = 2.0) -> Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], None]:
    """The rule for twins: a check of (twin, reference, truth)."""

    def check(twin: Sequence[Tensor], reference: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
        _check_shapes(twin, reference)
        for i, (found, plain, true) in enumerate(zip(twin, reference, truth)):
            found = found.to(plain.device)
            if not plain.is_floating_point() or plain.dtype == torch.float8_e4m3fn:
                _check_exact(i, found, plain)
                continue
            allowed = max(factor * error(plain, true), torch.finfo(plain.dtype).eps)
            if not error(found, true) <= allowed:
                raise Mismatch(f"tensor {i}, {plain.dtype}: the twin's error {error(found, true):.3g} exceeds {allowed:.3g}")

    return check


def _check_shapes(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    if [tuple(t.shape) for t in a] != [tuple(t.shape) for t in b]:
        raise Mismatch(f"shapes differ: {[tuple(t.shape) for t in a]} and {[tuple(t.shape) for t in b]}")


def _check_exact(i: int, found: Tensor, expected: Tensor) -> None:
    if found.dtype == torch.float8_e4m3fn:
        found, expected = found.view(torch.uint8), expected.view(torch.uint8)
    if not torch.equal(found, expected.to(found.dtype)):
        where = (found != expected.to(found.dtype)).nonzero()
        first = tuple(where[0].tolist())
        raise Mismatch(f"tensor {i}: {len(where)} of {found.numel()} differ, first at {first}: {found[first]} and {expected[first]}")


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride())):
        if stride == 0 and size > 1:
            return _to_device(x.narrow(dim, 0, 1), device).expand_as(x)
    copy = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    return copy.copy_(x)
