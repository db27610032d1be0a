# SPDX-License-Identifier: Apache-2.0
"""Engram: hashed n-gram rows injected into the residual streams (design note deepseek-v41 §3.10)."""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.kernels import engram
from whalefall.layers.host_table import pinned_view
from whalefall.layers.linear import Linear, Storage
from whalefall.layers.parametric import Parametric


class EngramTable(Parametric):
    """The embedding rows, gathered and never multiplied. FP8 rows stay as stored, on the host: as views of the mapped checkpoint when the
    CPU computes, in pinned memory that the device reads when a GPU does."""

    def __init__(self, rows: int, width: int, storage: Storage) -> None:
        super().__init__()
        self.rows, self.width, self.dtype, self._device = rows, width, storage.dtype, storage.device
        self.is_packed = storage.is_quantised
        self._awaited = {"weight", "scale"} if self.is_packed else {"weight"}
        self._tensors: dict[str, Tensor] = {}

    def fill(self, part: str, tensor: Tensor) -> None:
        # No copy on a CPU: the released tables are 94 GiB each and a token touches 24 rows.
        self.accept(part, tensor, (self.rows, self.width // 32 if part == "scale" else self.width))
        self._tensors[part] = pinned_view(tensor, self._device) if self._device.type == "cuda" else tensor

    def forward(self, rows_TJ: Tensor) -> Tensor:
        """[T, J * width] in the activation dtype."""
        if self.is_packed:
            return engram.gather_fp8(self._tensors["weight"], self._tensors["scale"], rows_TJ, self.dtype)
        return engram.gather_dense(self._tensors["weight"], rows_TJ, self.dtype)


class Engram(Parametric):
    q_weight: Tensor
    k_weight: Tensor

    def __init__(self, hidden_size: int, streams: int, *, num_rows: int, slots: int, width: int, eps: float, storage: Storage) -> None:
        super().__init__()
        self.streams, self.eps = streams, eps
        self.embed = EngramTable(num_rows, width, storage)
        self.wkv = Linear(slots * width, (streams + 1) * hidden_size, storage)
        self.declare("q_weight", (streams, hidden_size), torch.float32, storage.device)
        self.declare("k_weight", (streams, hidden_size), torch.float32, storage.device)

    def forward(self, streams_TSH: Tensor, rows_TJ: Tensor) -> Tensor:
        """New streams. rows_TJ: table rows of each token's n-grams, from `kernels.engram.hash_rows`."""
        kv_TSH = self.wkv(self.embed(rows_TJ)).unflatten(-1, (self.streams + 1, -1))
        return engram.inject(streams_TSH, kv_TSH[:, : self.streams], kv_TSH[:, self.streams], self.q_weight, self.k_weight, self.eps)
