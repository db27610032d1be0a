# SPDX-License-Identifier: Apache-2.0
"""Token embedding."""

from __future__ import annotations

from torch import Tensor

from whalefall.layers.linear import Storage
from whalefall.layers.parametric import Parametric


class Embedding(Parametric):
    weight: Tensor

    def __init__(self, vocab_size: int, hidden_size: int, storage: Storage) -> None:
        super().__init__()
        self.declare("weight", (vocab_size, hidden_size), storage.dtype, storage.device)

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.weight[ids_T]
