# SPDX-License-Identifier: Apache-2.0
"""The toy's forward: a pre-norm transformer with ordinary causal attention over a block cache.

It shows the whole contract of a model. `forward` sees all tokens of a step end to end, writes what it keeps through the block table,
reads it back the same way, and gives logits for the wanted rows. Chunks, decoding and batching are the same code.
W = rows of one request, padded to the longest; C = context positions, padded to the longest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from whalefall.core.batch import CacheTensors, ForwardBatch
from whalefall.layers.embedding import Embedding
from whalefall.layers.linear import Float32Linear, Linear, Storage
from whalefall.layers.norm import RMSNorm
from whalefall.models.definition import BuildContext
from whalefall.models.toy.cache import field_name
from whalefall.models.toy.config import ToyConfig


class Places:
    """Where the step's rows and contexts lie in the block pools: derived once, used by every layer."""

    def __init__(self, batch: ForwardBatch, block_tokens: int) -> None:
        rows, device = batch.encoder, batch.input_ids_T.device
        position_C = torch.arange(batch.max_context, device=device)
        self.entry_BC = batch.block_table_BP[:, position_C // block_tokens] * block_tokens + position_C % block_tokens
        self.request_T = rows.request_T
        self.row_T = rows.positions_T - rows.start_B[rows.request_T]
        # Rows below write_start lie in blocks adopted from the prefix cache: complete, and shared. Their writes go to the null block.
        is_ours_T = rows.positions_T >= batch.write_start_B[rows.request_T]
        self.write_T = torch.where(is_ours_T, self.entry_BC[rows.request_T, rows.positions_T], 0)
        self.padded_shape = (batch.num_requests, rows.max_rows)
        self.is_unknown_BC = position_C >= batch.context_B[:, None]
        position_BW = rows.start_B[:, None] + torch.arange(rows.max_rows, device=device)
        self.is_visible_BWC = position_C <= position_BW[..., None]


class Block(nn.Module):
    def __init__(self, config: ToyConfig, storage: Storage) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.attn_norm = RMSNorm(hidden, config.rms_norm_eps, storage.device)
        self.wqkv = Linear(hidden, 3 * hidden, storage)
        self.wo = Linear(hidden, hidden, storage)
        self.ffn_norm = RMSNorm(hidden, config.rms_norm_eps, storage.device)
        self.w1 = Linear(hidden, inner, storage)
        self.w2 = Linear(inner, hidden, storage)

    def forward(self, x_TH: Tensor, places: Places, pool: Tensor) -> Tensor:
        x_TH = x_TH + self.wo(self.attend(self.wqkv(self.attn_norm(x_TH)), places, pool))
        return x_TH + self.w2(nn.functional.silu(self.w1(self.ffn_norm(x_TH))))

    def attend(self, qkv_TH3: Tensor, places: Places, pool: Tensor) -> Tensor:
        hidden = self.num_heads * self.head_dim
        q_TH, kv_TH2 = qkv_TH3.split([hidden, 2 * hidden], dim=-1)
        pool[places.write_T] = kv_TH2
        # Positions beyond a request's end read the null block or stale entries. Masked they weigh 0, but 0 * NaN is NaN: clear them.
        kv_BCH2 = pool[places.entry_BC].masked_fill(places.is_unknown_BC[..., None], 0)
        q_BWH = q_TH.new_zeros(*places.padded_shape, hidden)
        q_BWH[places.request_T, places.row_T] = q_TH
        q_BNWD, k_BNCD, v_BNCD = (
            x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q_BWH, *kv_BCH2.chunk(2, dim=-1))
        )
        out_BNWD = nn.functional.scaled_dot_product_attention(q_BNWD, k_BNCD, v_BNCD, attn_mask=places.is_visible_BWC[:, None])
        return out_BNWD.transpose(1, 2).flatten(-2)[places.request_T, places.row_T]


class Toy(nn.Module):
    def __init__(self, config: ToyConfig, context: BuildContext) -> None:
        super().__init__()
        storage = Storage(dtype=context.dtype, device=context.device, is_quantised=False, is_packed=False)
        self.embed = Embedding(config.vocab_size, config.hidden_size, storage)
        self.layers = nn.ModuleList(Block(config, storage) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context.device)
        self.head = Float32Linear(config.hidden_size, config.vocab_size, context.device)

    def forward(self, batch: ForwardBatch, cache: CacheTensors) -> Tensor:
        places = Places(batch, cache.block_tokens)
        x_TH = self.embed(batch.input_ids_T)
        x_TH = x_TH + sinusoids(batch.encoder.positions_T, x_TH.shape[-1]).to(x_TH.dtype)
        for layer, block in enumerate(self.layers):
            x_TH = block(x_TH, places, cache.growing[field_name(layer)])
        return self.head(self.norm(x_TH[batch.logit_rows_L]))


def sinusoids(positions_T: Tensor, size: int) -> Tensor:
    """Position vectors of "Attention Is All You Need" §3.5: float32 [T, size]."""
    rate = torch.exp(torch.arange(0, size, 2, device=positions_T.device) * (-math.log(10_000.0) / size))
    angle_TF = positions_T[:, None].float() * rate
    return torch.cat([angle_TF.sin(), angle_TF.cos()], dim=-1)
