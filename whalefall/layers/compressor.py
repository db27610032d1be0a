# SPDX-License-Identifier: Apache-2.0
"""Compressor: one latent per group of tokens (design note deepseek-v41 §3.5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whalefall.kernels.compress import pool_group
from whalefall.layers.linear import Float32Linear, Storage
from whalefall.layers.norm import RMSNorm


class Compressor(nn.Module):
    """Ratio 1 is a plain projection; above, a per-channel softmax over the group's tokens."""

    def __init__(self, hidden_size: int, head_dim: int, ratio: int, eps: float, storage: Storage) -> None:
        super().__init__()
        self.ratio = ratio
        device, stored = storage.device, storage.wide_dtype
        self.wkv = Float32Linear(hidden_size, head_dim, device, stored=stored)
        self.wgate = Float32Linear(hidden_size, head_dim, device, stored=stored) if ratio > 1 else None
        self.norm = RMSNorm(head_dim, eps, device)

    def project(self, x_TH: Tensor) -> Tensor:
        """float32 per token: the value [T, D], and for ratio > 1 the gate beside it [T, 2D]. This is what an open group keeps."""
        value_TD = self.wkv(x_TH)
        return value_TD if self.wgate is None else torch.cat((value_TD, self.wgate(x_TH)), dim=-1)

    def latent(self, members_Tr: Tensor | None, projected_MD: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, D] in dtype: the normed latent of the group that ends at each token.

        members_Tr points at the rows of the group's tokens in projected_MD, oldest first; None for ratio 1. Where a group does not end at
        a token, its row is meaningless and the caller must not store it.
        """
        if members_Tr is None:
            return self.norm(projected_MD.to(dtype))
        values_TrD, gates_TrD = projected_MD[members_Tr.clamp_min(0)].chunk(2, dim=-1)
        return self.norm(pool_group(values_TrD, gates_TrD).to(dtype))
