# SPDX-License-Identifier: Apache-2.0
"""Indexer: keys from the compressed latent, queries from the low-rank query (design note deepseek-v41 §3.6)."""

from __future__ import annotations

from torch import Tensor, nn

from whalefall.kernels.latent import Rounding, norm_rotate_round, rotate_round
from whalefall.layers.linear import Linear, Storage
from whalefall.layers.norm import RMSNorm


class Indexer(nn.Module):
    """`wk` and `k_norm` exist only where the layer owns index keys."""

    def __init__(
        self,
        hidden_size: int,
        query_rank: int,
        latent_dim: int,
        heads: int,
        head_dim: int,
        *,
        owns_keys: bool,
        eps: float,
        storage: Storage,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.wq_b = Linear(query_rank, heads * head_dim, storage)
        self.weights_proj = Linear(hidden_size, heads, storage, quantised=False)
        self.wk = Linear(latent_dim, head_dim, storage, quantised=False) if owns_keys else None
        self.k_norm = RMSNorm(head_dim, eps, storage.device) if owns_keys else None

    def keys(self, latent_TD: Tensor, cos_TF: Tensor, sin_TF: Tensor, rounding: Rounding = Rounding.NONE) -> Tensor:
        """[T, J] rotated to the position of each group's first token."""
        assert self.wk is not None and self.k_norm is not None, "this layer reads the index keys of another one"
        return norm_rotate_round(self.wk(latent_TD), self.k_norm.weight, self.k_norm.eps, cos_TF, sin_TF, rounding)

    def queries(
        self, x_TH: Tensor, qr_TR: Tensor, cos_TF: Tensor, sin_TF: Tensor, rounding: Rounding = Rounding.NONE
    ) -> tuple[Tensor, Tensor]:
        """(q_TIJ rotated, w_TI); the constant positive factor of the scores is left out, it cannot change a selection."""
        q_TIJ = rotate_round(self.wq_b(qr_TR).unflatten(-1, (self.heads, -1)), cos_TF, sin_TF, rounding)
        return q_TIJ, self.weights_proj(x_TH)
