# SPDX-License-Identifier: Apache-2.0
"""LatentAttention: multi-query attention with one latent as key and value (design note deepseek-v41 §3.4, §3.7, §3.8)."""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.core.seams import Comm
from whalefall.kernels.attention import sparse_mqa
from whalefall.kernels.latent import Rounding, norm_rotate_round
from whalefall.kernels.rope import rotate
from whalefall.layers.linear import Linear, Storage
from whalefall.layers.norm import RMSNorm
from whalefall.layers.parametric import Parametric


class LatentAttention(Parametric):
    """Projections around the sparse attention; which rows a query sees is the caller's."""

    attn_sink: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        q_rank: int,
        o_groups: int,
        o_rank: int,
        *,
        eps: float,
        storage: Storage,
        comm: Comm,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.o_groups = num_heads, head_dim, o_groups
        self.wq_a = Linear(hidden_size, q_rank, storage)
        self.q_norm = RMSNorm(q_rank, eps, storage.device)
        self.wq_b = Linear(q_rank, num_heads * head_dim, storage)
        self.wkv = Linear(hidden_size, head_dim, storage)
        self.kv_norm = RMSNorm(head_dim, eps, storage.device)
        self.wo_a = Linear(num_heads * head_dim // o_groups, o_groups * o_rank, storage)
        self.wo_b = Linear(o_groups * o_rank, hidden_size, storage)
        self.declare("attn_sink", (num_heads,), torch.float32, storage.device)
        self._comm = comm

    def latent(self, x_TH: Tensor, cos_TF: Tensor, sin_TF: Tensor, rounding: Rounding = Rounding.NONE) -> Tensor:
        """The window row [T, D] of each token, rotated, and rounded to a cache format."""
        return norm_rotate_round(self.wkv(x_TH), self.kv_norm.weight, self.kv_norm.eps, cos_TF, sin_TF, rounding)

    def low_rank_query(self, x_TH: Tensor) -> Tensor:
        return self.q_norm(self.wq_a(x_TH))

    def attend(
        self,
        qr_TR: Tensor,
        cos_TF: Tensor,
        sin_TF: Tensor,
        window_kv_MD: Tensor,
        window_index_TW: Tensor,
        main_kv_CD: Tensor | None = None,
        main_index_TK: Tensor | None = None,
    ) -> Tensor:
        """The sublayer's output [T, H] from the low-rank query and the rows it sees."""
        q_TND = rotate(self.wq_b(qr_TR).unflatten(-1, (self.num_heads, self.head_dim)), cos_TF, sin_TF)
        o_TND = sparse_mqa(q_TND, window_kv_MD, window_index_TW, main_kv_CD, main_index_TK, self.attn_sink, self.head_dim**-0.5)
        # Values carry the key's rotation; turning back by the query's position leaves a relative one.
        o_TND = rotate(o_TND, cos_TF, sin_TF, inverse=True)
        z_TGO = self.wo_a.grouped(o_TND.reshape(o_TND.shape[0], self.o_groups, -1))
        return self._comm.all_reduce(self.wo_b(z_TGO.flatten(1)))
