# SPDX-License-Identifier: Apache-2.0
"""Linear: y = x @ weight.T with the weight dense or in the checkpoint's packed FP8 tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whalefall.kernels import gemm, quant
from whalefall.layers.parametric import Parametric


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """How a model keeps its weights."""

    dtype: torch.dtype
    """Of activations and dense weights."""
    device: torch.device
    is_quantised: bool
    """The checkpoint holds FP8 tiles / FP4 experts / FP8 rows, each with a scale tensor."""
    is_packed: bool
    """Keep them as stored and dequantise when used; else dequantise while loading."""

    @property
    def wide_dtype(self) -> torch.dtype:
        """Of plain weights whose products stay float32. A GPU multiplies narrow ones as they are; a CPU would widen them at every call."""
        return self.dtype if self.device.type == "cuda" else torch.float32


class Linear(Parametric):
    """`quantised` says whether the checkpoint format applies to this weight at all; plain weights are always dense."""

    weight: Tensor
    scale: Tensor
    """UE8M0 bytes of the tiles; only when packed."""

    def __init__(self, in_features: int, out_features: int, storage: Storage, *, quantised: bool = True) -> None:
        super().__init__()
        self.is_quantised = quantised and storage.is_quantised
        self.is_packed = self.is_quantised and storage.is_packed
        self._half: dict[str, Tensor] = {}
        self.declare("weight", (out_features, in_features), torch.float8_e4m3fn if self.is_packed else storage.dtype, storage.device)
        self._scale_shape = (-(-out_features // 32), -(-in_features // 32))
        if self.is_packed:
            self.declare("scale", self._scale_shape, torch.uint8, storage.device)
        elif self.is_quantised:
            self._awaited.add("scale")

    def fill(self, part: str, tensor: Tensor) -> None:
        if self.is_packed or not self.is_quantised:
            return self.store(part, tensor)
        # Weight and scale arrive one after the other; the first one waits as a view of the mapped file.
        self.accept(part, tensor, self._scale_shape if part == "scale" else tuple(self.weight.shape))
        self._half[part] = tensor
        if len(self._half) == 2:
            self.weight.copy_(quant.dequantize_fp8_tile(self._half["weight"], self._half["scale"], self.weight.dtype))
            self._half.clear()

    def forward(self, x_TK: Tensor) -> Tensor:
        if self.is_packed:
            return gemm.linear_fp8_tile(x_TK, self.weight, self.scale)
        return gemm.linear(x_TK, self.weight)

    def grouped(self, x_TGK: Tensor) -> Tensor:
        """One product per group, [T, G, K] -> [T, G, out / G]: the weight's rows are the groups' weights, one above the other."""
        if self.is_packed:
            return gemm.grouped_linear_fp8_tile(x_TGK, self.weight, self.scale)
        return gemm.grouped_linear(x_TGK, self.weight.unflatten(0, (x_TGK.shape[1], -1)))

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """[out, in] values, for callers that need another product than x @ weight.T."""
        return quant.dequantize_fp8_tile(self.weight, self.scale, dtype) if self.is_packed else self.weight


class Float32Linear(Parametric):
    """A weight whose product must not be rounded to a narrow type: gate, compressor inputs, head."""

    weight: Tensor

    def __init__(self, in_features: int, out_features: int, device: torch.device, *, stored: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.declare("weight", (out_features, in_features), stored, device)

    def forward(self, x_TK: Tensor) -> Tensor:
        return gemm.linear_float32(x_TK, self.weight)
