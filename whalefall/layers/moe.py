# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: gate, routed experts, shared expert (design note deepseek-v41 §3.9)."""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.core.seams import Comm
from whalefall.kernels import moe, quant
from whalefall.kernels.gemm import linear_float32
from whalefall.layers.linear import Linear, Storage
from whalefall.layers.parametric import Parametric


class Gate(Parametric):
    """Chooses experts by sqrt-softplus score plus a bias for text tokens; `bias_vl`, for image tokens, is kept for vision input."""

    weight: Tensor
    bias: Tensor

    def __init__(self, hidden_size: int, num_experts: int, per_token: int, scale: float, storage: Storage) -> None:
        super().__init__()
        self.per_token, self.scale = per_token, scale
        device = storage.device
        self.declare("weight", (num_experts, hidden_size), storage.wide_dtype, device)
        self.declare("bias", (num_experts,), torch.float32, device)
        self.declare("bias_vl", (num_experts,), torch.float32, device)

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        return moe.gate(linear_float32(x_TH, self.weight), self.bias, self.per_token, self.scale)


class Experts(Parametric):
    """All routed experts in two stacked tensors, dense or packed MXFP4; gate rows stand above up rows in w13."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor

    def __init__(self, num_experts: int, hidden_size: int, inner: int, limit: float, storage: Storage) -> None:
        super().__init__()
        self.hidden_size, self.inner, self.limit, self.dtype = hidden_size, inner, limit, storage.dtype
        self.is_quantised = storage.is_quantised
        self.is_packed = storage.is_quantised and storage.is_packed
        self._half: dict[str, Tensor] = {}
        width = 2 if self.is_packed else 1  # values per stored element
        stored = torch.int8 if self.is_packed else storage.dtype
        shapes = {"w13": (num_experts, 2 * inner, hidden_size), "w2": (num_experts, hidden_size, inner)}
        for name, (e, n, k) in shapes.items():
            self.register_buffer(name, torch.empty(e, n, k // width, dtype=stored, device=storage.device))
            if self.is_packed:
                self.register_buffer(f"{name}_scale", torch.empty(e, n, k // 32, dtype=torch.uint8, device=storage.device))
        kinds = ("weight", "scale") if self.is_quantised else ("weight",)
        self._awaited = {f"{e}.{w}.{kind}" for e in range(num_experts) for w in ("w1", "w2", "w3") for kind in kinds}

    def fill(self, part: str, tensor: Tensor) -> None:
        """part: "<expert>.<w1|w2|w3>.<weight|scale>"."""
        matrix, _, kind = part.rpartition(".")
        self.accept(part, tensor, self._stored_shape(matrix, kind))
        if self.is_packed or not self.is_quantised:
            self._rows(matrix, kind).copy_(tensor)
            return
        self._half[part] = tensor
        if f"{matrix}.weight" in self._half and f"{matrix}.scale" in self._half:
            weight, scale = self._half.pop(f"{matrix}.weight"), self._half.pop(f"{matrix}.scale")
            self._rows(matrix, "weight").copy_(quant.dequantize_mxfp4(weight, scale, self.dtype))

    def _stored_shape(self, matrix: str, kind: str) -> tuple[int, ...]:
        rows, columns = (self.hidden_size, self.inner) if matrix.endswith("w2") else (self.inner, self.hidden_size)
        if kind == "scale":
            return rows, columns // 32
        return rows, columns // 2 if self.is_quantised else columns

    def _rows(self, matrix: str, kind: str) -> Tensor:
        expert, name = matrix.split(".")
        suffix = "_scale" if kind == "scale" else ""
        if name == "w2":
            return self.get_buffer(f"w2{suffix}")[int(expert)]
        half = slice(0, self.inner) if name == "w1" else slice(self.inner, 2 * self.inner)
        return self.get_buffer(f"w13{suffix}")[int(expert), half]

    def forward(self, x_TH: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
        """float32 [T, H]."""
        if self.is_packed:
            return moe.experts_mxfp4(x_TH, expert_TA, weight_TA, self.w13, self.w13_scale, self.w2, self.w2_scale, self.limit)
        return moe.experts_dense(x_TH, expert_TA, weight_TA, self.w13, self.w2, self.limit)

    def onto(self, base_TH: Tensor, x_TH: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
        """base + the experts' sum, in base's dtype."""
        if self.is_packed:
            packed = (self.w13, self.w13_scale, self.w2, self.w2_scale)
            return moe.experts_mxfp4_onto(base_TH, x_TH, expert_TA, weight_TA, *packed, self.limit)
        return (self(x_TH, expert_TA, weight_TA) + base_TH.float()).to(base_TH.dtype)


class SharedExpert(torch.nn.Module):
    def __init__(self, hidden_size: int, inner: int, limit: float, storage: Storage) -> None:
        super().__init__()
        self.limit = limit
        self.w1 = Linear(hidden_size, inner, storage)
        self.w3 = Linear(hidden_size, inner, storage)
        self.w2 = Linear(inner, hidden_size, storage)

    def forward(self, x_TH: Tensor) -> Tensor:
        if self.w1.is_packed:
            return self.w2(moe.swiglu_fp8_tile(x_TH, self.w1.weight, self.w1.scale, self.w3.weight, self.w3.scale, self.limit))
        return self.w2(moe.clamped_swiglu(self.w1(x_TH), self.w3(x_TH), self.limit))


class MoE(torch.nn.Module):
    def __init__(
        self, hidden_size: int, inner: int, num_experts: int, per_token: int, *, scale: float, limit: float, storage: Storage, comm: Comm
    ) -> None:
        super().__init__()
        self.gate = Gate(hidden_size, num_experts, per_token, scale, storage)
        self.experts = Experts(num_experts, hidden_size, inner, limit, storage)
        self.shared_experts = SharedExpert(hidden_size, inner, limit, storage)
        self._comm = comm

    def forward(self, x_TH: Tensor) -> Tensor:
        return self._comm.all_reduce(self.experts.onto(self.shared_experts(x_TH), x_TH, *self.gate(x_TH)))
