# SPDX-License-Identifier: Apache-2.0
"""Parametric: a module whose tensors are filled one by one from a checkpoint.

Parameters carry the checkpoint's names, so a tensor finds its place by walking the module tree; what is left of the name when no child
matches is the *part*, and the module says what to do with it. A sink over a whole model counts that every part came exactly once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whalefall.core.errors import ConfigError


class Parametric(nn.Module):
    """Owns inference tensors (no gradients). Declare them in the constructor; `fill` receives them in any order."""

    def __init__(self) -> None:
        super().__init__()
        self._awaited: set[str] = set()
        self._filled: set[str] = set()

    def declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make an uninitialised tensor attribute that the checkpoint must fill."""
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self.register_buffer(name, tensor)
        self._awaited.add(name)
        return tensor

    def fill(self, part: str, tensor: Tensor) -> None:
        """Store one checkpoint tensor. Subclasses override this where a stored tensor is not simply a declared one."""
        self.store(part, tensor)

    def store(self, name: str, tensor: Tensor) -> None:
        """Copy into a declared tensor, converting the dtype; a second fill or a wrong shape is an error."""
        target = self._buffers.get(name)
        if target is None:
            raise ConfigError(f"{type(self).__name__} has no tensor {name!r}")
        self.accept(name, tensor, tuple(target.shape))
        target.copy_(tensor)

    def accept(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Note that this part of the checkpoint has come; one that is unknown, comes twice or has another shape is an error."""
        if name not in self._awaited:
            what = f".{name} is filled twice" if name in self._filled else f" has no tensor {name!r}"
            raise ConfigError(f"{type(self).__name__}{what}")
        if tensor.shape != shape:
            raise ConfigError(f"{type(self).__name__}.{name}: expected shape {shape}, found {tuple(tensor.shape)}")
        self._awaited.remove(name)
        self._filled.add(name)

    def unfilled(self) -> list[str]:
        """Names of declared tensors that no checkpoint tensor has filled."""
        return sorted(self._awaited)


class ModuleSink:
    """WeightSink over a module tree: hands each checkpoint tensor to the module its name leads to."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    def put(self, name: str, tensor: Tensor) -> None:
        module, part = self._resolve(name)
        module.fill(part, tensor)

    def finish(self) -> None:
        """Raises ConfigError naming every parameter that stayed empty."""
        left = [
            f"{path}.{name}: no checkpoint tensor filled it"
            for path, module in self._root.named_modules()
            if isinstance(module, Parametric)
            for name in module.unfilled()
        ]
        if left:
            raise ConfigError(left)

    def _resolve(self, name: str) -> tuple[Parametric, str]:
        module, parts = self._root, name.split(".")
        while parts and (child := dict(module.named_children()).get(parts[0])) is not None:
            module = child
            parts = parts[1:]
        if not parts or not isinstance(module, Parametric):
            raise ConfigError(f"{name}: the model has no place for this tensor")
        return module, ".".join(parts)
