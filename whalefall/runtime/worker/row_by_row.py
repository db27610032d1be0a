# SPDX-License-Identifier: Apache-2.0
"""RowByRow: a model whose every row is computed alone, so that its bits cannot depend on the company.

A product of many rows adds in another order than a product of one, and which order depends on the number of rows, their place in a tile and
the longest context of the step. Here every forward has one row, at one position, and is therefore the same computation whatever else runs:
shapes follow from the position, values from the caches, and the caches were filled in the same way. The price is that nothing is shared
between rows; docs/sampling.md has it in figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from whalefall.core.batch import CacheTensors, ForwardBatch, RowSet
from whalefall.models.definition import Model, Watched


class RowByRow:
    """A Model around a Model. Reads the batch on the host: nothing here is for captured graphs."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def health_counters(self) -> Mapping[str, Tensor]:
        return self._model.health_counters() if isinstance(self._model, Watched) else {}

    def forward(self, batch: ForwardBatch, cache: CacheTensors) -> Tensor:
        logits_by_row: dict[int, Tensor] = {}
        for decoder_row, one in _single_rows(batch, cache.block_tokens):
            logits_LV = self._model.forward(one, cache)
            if one.logit_rows_L.numel():
                logits_by_row[decoder_row] = logits_LV
        wanted = batch.logit_rows_L.tolist()
        if not wanted:
            return logits_LV  # no rows, of the right width
        return torch.cat([logits_by_row[row] for row in wanted])


def _single_rows(batch: ForwardBatch, block_tokens: int) -> Iterator[tuple[int, ForwardBatch]]:
    """(index among the decoder rows, or -1; a batch of one row), for every row of the step, in order."""
    rows = batch.encoder
    ids, positions, requests = batch.input_ids_T.tolist(), rows.positions_T.tolist(), rows.request_T.tolist()
    decoder_rows = range(rows.num_rows) if batch.decoder_rows_D is None else batch.decoder_rows_D.tolist()
    decoder_place = {row: place for place, row in enumerate(decoder_rows)}
    wanted = set(batch.logit_rows_L.tolist())
    history: list[int] = []
    last_request = -1
    for row, (token_id, position, request) in enumerate(zip(ids, positions, requests)):
        if request != last_request:
            history, last_request = batch.history_BH[request].tolist(), request
        place = decoder_place.get(row, -1)
        yield place, _single(batch, token_id, position, request, history, block_tokens, is_decoder=place >= 0, is_wanted=place in wanted)
        history = [token_id, *history][: len(history)]


def _single(
    batch: ForwardBatch,
    token_id: int,
    position: int,
    request: int,
    history: list[int],
    block_tokens: int,
    *,
    is_decoder: bool,
    is_wanted: bool,
) -> ForwardBatch:
    device, at = batch.slot_B.device, slice(request, request + 1)
    encoder = _row_set(position, batch.encoder.window_start_B[at], num_rows=1)
    decoder = encoder
    if not is_decoder or batch.decoder is not batch.encoder:
        decoder = _row_set(position, batch.decoder.window_start_B[at], num_rows=int(is_decoder))
    return ForwardBatch(
        input_ids_T=torch.tensor([token_id], device=device),
        history_BH=torch.tensor([history], dtype=torch.int64, device=device),
        encoder=encoder,
        decoder=decoder,
        decoder_rows_D=None if is_decoder else torch.zeros(0, dtype=torch.int64, device=device),
        slot_B=batch.slot_B[at],
        block_table_BP=batch.block_table_BP[at, : position // block_tokens + 1],
        context_B=torch.tensor([position + 1], device=device),
        write_start_B=batch.write_start_B[at],
        max_context=position + 1,
        logit_rows_L=torch.zeros(int(is_wanted), dtype=torch.int64, device=device),
    )


def _row_set(position: int, window_start_B: Tensor, *, num_rows: int) -> RowSet:
    device = window_start_B.device
    return RowSet(
        positions_T=torch.full((num_rows,), position, device=device),
        request_T=torch.zeros(num_rows, dtype=torch.int64, device=device),
        first_row_B=torch.zeros(1, dtype=torch.int64, device=device),
        start_B=torch.full((1,), position, device=device),
        window_start_B=window_start_B,
        num_rows=num_rows,
        max_rows=num_rows,
    )
