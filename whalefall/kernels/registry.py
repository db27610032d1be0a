# SPDX-License-Identifier: Apache-2.0
"""Ops, their implementations, and which one runs.

An op *is* its plain torch reference, so every op runs on every device. A twin registers with `@op_name.impl(...)`, with what it needs
from the device and from the arguments. The first registered twin whose conditions hold runs; else the reference.
`tests/kernels/test_twins.py` walks `all_ops()`: a twin is tested by being registered.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from whalefall import kernels

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Device:
    """What a twin needs from the machine."""

    type: str = "cuda"
    sm: int = 0
    """Lowest compute capability, major * 10 + minor; only for cuda."""

    def is_met_by(self, device: torch.device) -> bool:
        if device.type != self.type:
            return False
        if device.type != "cuda" or self.sm == 0:
            return True
        major, minor = torch.cuda.get_device_capability(device)
        return major * 10 + minor >= self.sm


@dataclass(frozen=True, slots=True)
class Impl(Generic[P, R]):
    name: str
    fn: Callable[P, R]
    needs: Device
    when: Callable[P, bool] | None

    def why_not(self, device: torch.device, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """None when this twin can run the call, else the reason why it is passed over."""
        if not self.needs.is_met_by(device):
            return f"needs {self.needs.type}" + (f" sm{self.needs.sm}" if self.needs.sm else "")
        if self.when is not None and not self.when(*args, **kwargs):
            return "shape or dtype outside its range"
        return None


class Op(Generic[P, R]):
    """A callable op: dispatches to a twin, or runs the reference."""

    def __init__(self, reference: Callable[P, R], name: str, cases: Callable[[], Iterator[tuple[Any, ...]]] | None) -> None:
        self.reference = reference
        self.name = name
        self.cases = cases
        """Makes sample inputs for the twin tests: argument tuples that hold the edges."""
        self.impls: list[Impl[P, R]] = []
        self.__doc__ = reference.__doc__
        self.__name__ = name

    def impl(self, name: str, *, needs: Device, when: Callable[P, bool] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register a twin under `name`; order of registration is order of preference."""

        def register(fn: Callable[P, R]) -> Callable[P, R]:
            self.impls.append(Impl(name, fn, needs, when))
            return fn

        return register

    def select(self, *args: P.args, **kwargs: P.kwargs) -> Callable[P, R]:
        if not self.impls or _reference_only_depth:
            return self.reference
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        for candidate in self.impls:
            if candidate.why_not(device, *args, **kwargs) is None:
                return candidate.fn
        return self.reference

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self.impls:
            return self.reference(*args, **kwargs)
        return self.select(*args, **kwargs)(*args, **kwargs)


_OPS: dict[str, Op[Any, Any]] = {}
_reference_only_depth = 0


@contextmanager
def reference_only() -> Iterator[None]:
    """Inside, every op runs its reference, on every thread of the process: for finding out what the twins are worth."""
    global _reference_only_depth
    _reference_only_depth += 1
    try:
        yield
    finally:
        _reference_only_depth -= 1


def twins_on(device: torch.device) -> dict[str, tuple[str, ...]]:
    """Op -> the twins that this device can run, for some arguments at least; ops without one are left out. Empty in `reference_only`."""
    if _reference_only_depth:
        return {}
    found = {name: tuple(i.name for i in made.impls if i.needs.is_met_by(device)) for name, made in load_all().items()}
    return {name: twins for name, twins in found.items() if twins}


def op(name: str, *, cases: Callable[[], Iterator[tuple[Any, ...]]] | None = None) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make the decorated reference an op named "family.op"."""

    def wrap(reference: Callable[P, R]) -> Op[P, R]:
        assert name not in _OPS, f"op {name} is defined twice"
        made = Op(reference, name, cases)
        _OPS[name] = made
        return made

    return wrap


def load_all() -> dict[str, Op[Any, Any]]:
    """Import every family of this package and give every op by name."""
    for family in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        if family.ispkg:
            import_module(family.name)
    return all_ops()


def all_ops() -> dict[str, Op[Any, Any]]:
    """Every op defined by the modules imported so far, by name."""
    return dict(sorted(_OPS.items()))
