# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1: the forward pass of one step, top to bottom as in design note deepseek-v41 §3.

Tokens of all requests lie end to end. Encoder rows (every row) run through the layers below the border layer; the border layer writes its
caches for all of them; then one gather leaves the decoder rows, which run through the rest (§6.2). In exact mode nothing is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from whalefall.core.batch import CacheTensors, ForwardBatch
from whalefall.kernels import mhc
from whalefall.kernels.rope import plain_frequencies, yarn_frequencies
from whalefall.layers.embedding import Embedding
from whalefall.layers.linear import Float32Linear, Storage
from whalefall.layers.norm import RMSNorm
from whalefall.models.deepseek_v41.block import Block
from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.deepseek_v41.dspark import DraftBlocks, Taps
from whalefall.models.deepseek_v41.ngrams import EngramHash
from whalefall.models.deepseek_v41.sparse import Lists
from whalefall.models.deepseek_v41.step import RopeTables, StepIndex
from whalefall.models.definition import BuildContext


class DeepseekV41(nn.Module):
    def __init__(self, config: DeepseekV41Config, context: BuildContext) -> None:
        super().__init__()
        storage = Storage(
            dtype=context.dtype, device=context.device, is_quantised=config.is_quantised, is_packed=context.weights == "packed"
        )
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, storage)
        self._blocks = [Block(config, layer, context, storage) for layer in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(self._blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context.device)
        self.head = Float32Linear(config.hidden_size, config.vocab_size, context.device, stored=context.dtype)
        self.mtp = DraftBlocks(config, context, storage) if context.uses_own_drafter else None
        self.engram_hash = EngramHash(config, context.model_dir, context.device) if config.engram_layer_ids else None
        self.rope = _rope_tables(config, context.device)
        self.tag_mismatches = torch.zeros((), dtype=torch.int64, device=context.device)
        """Window rows that should have been there and were not, since start. Stays 0 unless the bookkeeping has a fault."""

    def health_counters(self) -> Mapping[str, Tensor]:
        return {"ring_tag_mismatch": self.tag_mismatches}

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: CacheTensors) -> Tensor:
        step = StepIndex(self.config, batch, cache, self.rope)
        engram_rows = self.engram_hash(batch) if self.engram_hash is not None else {}
        border = self.config.num_encoder_layers
        streams_TSH = self.embed(batch.input_ids_T)[:, None].expand(-1, self.config.hc_mult, -1)
        carry_TS = torch.zeros(streams_TSH.shape[:2], device=streams_TSH.device)
        carry_TS[:, 0] = 1
        lists = Lists()
        taps = Taps(self.config.dspark_target_layer_ids if self.mtp is not None else ())
        for layer, block in enumerate(self._blocks[:border]):
            taps.see(layer, streams_TSH)
            streams_TSH, carry_TS = block(streams_TSH, carry_TS, engram_rows.get(layer), step.encoder, step, cache, lists)
        border_block = self._blocks[border]
        taps.see(border, streams_TSH)
        x_TH = border_block.attn_norm(mhc.collapse(streams_TSH, carry_TS))
        window_kv_MD = border_block.attn.write(x_TH, step.encoder, step, cache)
        if batch.decoder_rows_D is not None:
            streams_TSH, x_TH = streams_TSH[batch.decoder_rows_D], x_TH[batch.decoder_rows_D]
            taps.keep(batch.decoder_rows_D)
        self.tag_mismatches += step.num_mismatches()
        if batch.decoder.num_rows == 0:
            return torch.empty(0, self.config.vocab_size, device=streams_TSH.device)
        streams_TSH, carry_TS = border_block.after_write(streams_TSH, x_TH, window_kv_MD, step.border, step, cache, lists)
        for layer, block in enumerate(self._blocks[border + 1 :], border + 1):
            taps.see(layer, streams_TSH)
            streams_TSH, carry_TS = block(streams_TSH, carry_TS, None, step.decoder, step, cache, lists)
        if self.mtp is not None:
            self.mtp.feed(taps.features(), step.decoder, cache)
        rows_L = batch.logit_rows_L
        return self.head(self.norm(mhc.collapse(streams_TSH[rows_L], carry_TS[rows_L])))


def _rope_tables(config: DeepseekV41Config, device: torch.device) -> RopeTables:
    dim, yarn = config.qk_rope_head_dim, config.rope_scaling
    long_F = yarn_frequencies(
        dim,
        config.compress_rope_theta,
        factor=yarn.factor,
        original_max=yarn.original_max_position_embeddings,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
    )
    return RopeTables(plain_F=plain_frequencies(dim, config.rope_theta).to(device), long_F=long_F.to(device))
