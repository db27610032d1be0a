# SPDX-License-Identifier: Apache-2.0
"""A model made of bookkeeping: its next token is an exact function of everything a model may keep or be told.

State: a running sum of ids. Ring with tags: the ids of the last rows. Growing field: one id per token, read back through the block table.
History: ids before the first row. Decoder: the decoder rows' own ring. `expected_next` is the same by plain recursion.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whalefall.core.batch import CacheTensors, ForwardBatch, RowSet
from whalefall.core.cache_spec import CacheSpec, GrowingField, RingField, StateField

VOCAB, WINDOW, HISTORY, BLOCK_TOKENS = 97, 5, 3, 4

SPEC = CacheSpec(
    block_tokens=BLOCK_TOKENS,
    growing=(GrowingField(name="ids", width=1, dtype="float32", tokens_per_entry=1),),
    rings=(
        RingField(name="encoder", width=1, dtype="float32", rows=WINDOW, group="encoder"),
        RingField(name="decoder", width=1, dtype="float32", rows=WINDOW, group="decoder"),
    ),
    states=(StateField(name="sum", shape=(1,), dtype="float32"),),
)


def expected_next(ids: Sequence[int], decoder_start: int = 0) -> int:
    """The token after `ids`; decoder rows begin at decoder_start."""
    position = len(ids) - 1
    window = sum(ids[max(0, position - WINDOW + 1) :])
    decoder_window = sum(ids[max(0, decoder_start, position - WINDOW + 1) :])
    history = sum((i + 2) * (ids[position - 1 - i] if position - 1 - i >= 0 else -1) for i in range(HISTORY))
    return (sum(ids) + 3 * sum(ids) + 5 * window + 7 * decoder_window + 11 * history) % VOCAB


class Probe:
    """Loops over rows: this is a test's model, and the loops are its point."""

    def forward(self, batch: ForwardBatch, cache: CacheTensors) -> Tensor:
        decoder_rows = list(range(batch.encoder.num_rows)) if batch.decoder_rows_D is None else batch.decoder_rows_D.tolist()
        values = {}
        for row, (request, position) in enumerate(zip(batch.encoder.request_T.tolist(), batch.encoder.positions_T.tolist())):
            values[row] = self._encode(batch, cache, row, request, position)
        logits_DV = torch.zeros(len(decoder_rows), VOCAB)
        for i, row in enumerate(decoder_rows):
            request, position = int(batch.decoder.request_T[i]), int(batch.decoder.positions_T[i])
            window = self._ring(batch, cache, "decoder", batch.decoder, request, position, int(batch.input_ids_T[row]))
            logits_DV[i, (values[row] + 7 * window) % VOCAB] = 1.0
        return logits_DV[batch.logit_rows_L]

    def _encode(self, batch: ForwardBatch, cache: CacheTensors, row: int, request: int, position: int) -> int:
        token_id, slot = int(batch.input_ids_T[row]), int(batch.slot_B[request])
        cache.states["sum"][slot] += token_id
        cache.growing["ids"][self._entry(batch, request, position)] = token_id
        total = sum(int(cache.growing["ids"][self._entry(batch, request, p)]) for p in range(position + 1))
        window = self._ring(batch, cache, "encoder", batch.encoder, request, position, token_id)
        history = sum((i + 2) * self._before(batch, row, request, 1 + i) for i in range(HISTORY))
        return total + 3 * int(cache.states["sum"][slot]) + 5 * window + 11 * history

    def _entry(self, batch: ForwardBatch, request: int, position: int) -> int:
        block = int(batch.block_table_BP[request, position // BLOCK_TOKENS])
        assert block != 0, "a row beyond the request's blocks"
        return block * BLOCK_TOKENS + position % BLOCK_TOKENS

    def _ring(self, batch: ForwardBatch, cache: CacheTensors, name: str, rows: RowSet, request: int, position: int, token_id: int) -> int:
        slot = int(batch.slot_B[request])
        cache.rings[name][slot, position % WINDOW] = token_id
        cache.tags[name][slot, position % WINDOW] = position
        low = max(position - WINDOW + 1, int(rows.window_start_B[request]))
        return sum(
            int(cache.rings[name][slot, p % WINDOW]) for p in range(low, position + 1) if int(cache.tags[name][slot, p % WINDOW]) == p
        )

    def _before(self, batch: ForwardBatch, row: int, request: int, distance: int) -> int:
        at = row - distance
        first = int(batch.encoder.first_row_B[request])
        return int(batch.input_ids_T[at]) if at >= first else int(batch.history_BH[request, first - at - 1])
