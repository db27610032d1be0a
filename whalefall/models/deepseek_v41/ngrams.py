# SPDX-License-Identifier: Apache-2.0
"""EngramHash: from token ids to table rows, for all Engram layers at once (design note deepseek-v41 §3.10).

Rows depend on token ids alone, so they are known before the forward starts. The look-back uses the request's true ids, also across chunk
borders; the runtime hands in the ids before the step's first row.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from whalefall.core.batch import ForwardBatch
from whalefall.core.errors import ConfigError
from whalefall.kernels.engram import hash_rows
from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.deepseek_v41.engram_tables import compressed_vocab, hash_multipliers, table_offsets, table_primes


class EngramHash:
    def __init__(self, config: DeepseekV41Config, model_dir: Path, device: torch.device) -> None:
        vocab = compressed_vocab(model_dir / "tokenizer.json", config.vocab_size)
        if vocab.count != config.engram_compressed_vocab_size:
            raise ConfigError(
                f"tokenizer.json: its compressed vocabulary has {vocab.count:,} ids, config.json says "
                f"engram_compressed_vocab_size = {config.engram_compressed_vocab_size:,}: this is not the model's tokenizer"
            )
        # One more entry, reached by index -1: no token there.
        self._map_V1 = torch.cat((torch.from_numpy(vocab.map_V), torch.tensor([-1]))).to(device)
        self._pad = int(vocab.map_V[config.engram_pad_token_id])
        self._look_back = config.history_tokens
        sizes = config.engram_max_ngram_size - 1
        primes = table_primes(config.engram_vocab_size, len(config.engram_layer_ids), config.engram_max_ngram_size, config.engram_n_heads)
        self._constants = {
            layer: (
                torch.tensor(hash_multipliers(layer, vocab.count, config.engram_max_ngram_size), device=device),
                torch.tensor(own, device=device).view(sizes, -1),
                torch.tensor(table_offsets(own), device=device).view(sizes, -1),
            )
            for layer, own in zip(config.engram_layer_ids, primes)
        }

    def __call__(self, batch: ForwardBatch) -> dict[int, Tensor]:
        """Engram layer -> int64 table rows [T, slots] of the encoder rows."""
        compressed_TK = self._map_V1[self._recent_ids(batch)]
        return {layer: hash_rows(compressed_TK, self._pad, *constants) for layer, constants in self._constants.items()}

    def _recent_ids(self, batch: ForwardBatch) -> Tensor:
        """int64 [T, K]: the row's own id, then the ids before it; -1 before the start of the sequence."""
        rows = batch.encoder
        back_K = torch.arange(self._look_back + 1, device=rows.positions_T.device)
        in_request_T = rows.positions_T - rows.start_B[rows.request_T]
        row_TK = torch.arange(rows.num_rows, device=back_K.device)[:, None] - back_K
        # Row k before the first one is entry k - 1 of the history.
        before_TK = (back_K - in_request_T[:, None] - 1).clamp_min(0).clamp_max(self._look_back - 1)
        history_TK = batch.history_BH[rows.request_T].gather(1, before_TK)
        return torch.where(back_K <= in_request_T[:, None], batch.input_ids_T[row_TK.clamp_min(0)], history_TK)
