# SPDX-License-Identifier: Apache-2.0
"""GraphRunner: decode steps of a GPU as captured graphs, one launch instead of a thousand.

A graph is captured for a number of rows and a bound of the context, both rounded up to a few sizes; lengths, positions, blocks and slots
are data that each replay reads from fixed buffers. Rows that only fill up the size belong to a slot that no request ever gets and write to
the null block. Everything else (prefill, several rows of a request) runs as it is written.
"""

from __future__ import annotations

import bisect
import traceback
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whalefall.core.batch import CacheTensors, ForwardBatch, RowSet
from whalefall.models.definition import Model
from whalefall.observe.log import get_logger
from whalefall.runtime.worker.model_runner import ModelRunner

log = get_logger(__name__)

ROW_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)
SMALLEST_CONTEXT = 2048
CONTEXT_STEP = 4
"""Bounds of the context are SMALLEST_CONTEXT times powers of this: the indexer's work grows with the bound, the number of graphs with
its logarithm."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits_LV: Tensor


class NotCapturable(Exception):
    """A decode step of this model waits for the device, which a graph cannot."""


class GraphRunner:
    """Runs a step's batch: replays a graph where one fits, else the model itself."""

    def __init__(
        self, model: Model, cache: CacheTensors, vocab_size: int, *, max_rows: int, max_context: int, spare_slot: int, history_tokens: int
    ) -> None:
        """
        Args:
            max_rows: requests that may decode at once.
            max_context: longest context of a request, in tokens.
            spare_slot: a state slot that is no request's; filling rows use it.
        """
        self._model, self._cache = model, cache
        self._plain = ModelRunner(model, cache, vocab_size)
        self._rows = (*(size for size in ROW_SIZES if size < max_rows), max_rows)
        self._contexts = _context_bounds(max_context, cache.block_tokens)
        device = next(iter(cache.tags.values())).device
        self._buffers = _Buffers(max_rows, history_tokens, self._contexts[-1] // cache.block_tokens, spare_slot, device)
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._pool: Any = None
        self.num_replays = 0

    def capture(self) -> int:
        """Capture every number of rows at the smallest bound of the context, largest first; the others follow when first needed.

        Raises:
            NotCapturable: the forward reads the device; the message says where.
        """
        self._check()
        for rows in reversed(self._rows):
            self._graph(rows, self._contexts[0])
        return len(self._captured)

    def run(self, batch: ForwardBatch) -> Tensor:
        """As `ModelRunner.run`. The logits of a replay are overwritten by the next one."""
        if not self._fits(batch):
            return self._plain.run(batch)
        count = batch.encoder.num_rows
        rows = self._rows[bisect.bisect_left(self._rows, count)]
        context = self._contexts[bisect.bisect_left(self._contexts, batch.max_context)]
        captured = self._graph(rows, context)
        self._buffers.fill(batch, rows)
        captured.graph.replay()
        self.num_replays += 1
        return captured.logits_LV[:count]

    def _fits(self, batch: ForwardBatch) -> bool:
        """One row per request, each with its logits wanted: a plain decode step."""
        one_each = batch.encoder.max_rows == 1 and batch.encoder.num_rows == batch.num_requests <= self._rows[-1]
        return one_each and batch.decoder_rows_D is None and batch.logit_rows_L.shape[0] == batch.num_requests

    def _graph(self, rows: int, context: int) -> _Captured:
        found = self._captured.get((rows, context))
        if found is None:
            found = self._captured[rows, context] = self._capture(rows, context)
        return found

    def _check(self) -> None:
        """One step as it is written, in which nothing may wait for the device: a fault inside a capture would not say where it is."""
        batch = self._buffers.batch(1, self._contexts[0], self._cache.block_tokens)
        self._buffers.clear(1)
        self._model.forward(batch, self._cache)  # once before, so that what is set up only once is no fault
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._model.forward(batch, self._cache)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise NotCapturable(f"{place.filename}:{place.lineno} waits for the device ({place.line})") from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def _capture(self, rows: int, context: int) -> _Captured:
        batch = self._buffers.batch(rows, context, self._cache.block_tokens)
        self._buffers.clear(rows)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once as it is written: kernels compile and libraries make their workspaces
            self._model.forward(batch, self._cache)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits_LV = self._model.forward(batch, self._cache)
        self._pool = graph.pool()
        log.debug("captured a decode graph of %d rows, contexts up to %d", rows, context)
        return _Captured(graph, logits_LV)


class _Buffers:
    """Where graphs read their batch: one set, of which a graph of R rows uses the first R."""

    def __init__(self, max_rows: int, history_tokens: int, num_blocks: int, spare_slot: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._spare_slot = spare_slot
        self._ids, self._positions, self._slots, self._contexts = (zeros(max_rows) for _ in range(4))
        self._window_starts, self._decoder_starts, self._write_starts = (zeros(max_rows) for _ in range(3))
        self._history, self._table = zeros(max_rows, history_tokens), zeros(max_rows, num_blocks)
        self._order = torch.arange(max_rows, dtype=torch.int64, device=device)

    def batch(self, rows: int, context: int, block_tokens: int) -> ForwardBatch:
        order = self._order[:rows]
        encoder = RowSet(
            positions_T=self._positions[:rows],
            request_T=order,
            first_row_B=order,
            start_B=self._positions[:rows],
            window_start_B=self._window_starts[:rows],
            num_rows=rows,
            max_rows=1,
        )
        return ForwardBatch(
            input_ids_T=self._ids[:rows],
            history_BH=self._history[:rows],
            encoder=encoder,
            decoder=replace(encoder, window_start_B=self._decoder_starts[:rows]),
            decoder_rows_D=None,
            slot_B=self._slots[:rows],
            block_table_BP=self._table[:rows, : context // block_tokens],
            context_B=self._contexts[:rows],
            write_start_B=self._write_starts[:rows],
            max_context=context,
            logit_rows_L=order,
        )

    def clear(self, rows: int) -> None:
        """Every row a filling one."""
        for buffer in (self._ids, self._positions, self._window_starts, self._decoder_starts, self._write_starts, self._table):
            buffer[:rows] = 0
        self._history[:rows] = -1
        self._slots[:rows] = self._spare_slot
        self._contexts[:rows] = 1

    def fill(self, batch: ForwardBatch, rows: int) -> None:
        count = batch.num_requests
        if count < rows:
            self.clear(rows)
        pairs = (
            (self._ids, batch.input_ids_T),
            (self._positions, batch.encoder.positions_T),
            (self._window_starts, batch.encoder.window_start_B),
            (self._decoder_starts, batch.decoder.window_start_B),
            (self._slots, batch.slot_B),
            (self._contexts, batch.context_B),
            (self._write_starts, batch.write_start_B),
            (self._history, batch.history_BH),
        )
        # One launch for all of them; every buffer is 64 bits wide.
        torch._foreach_copy_([buffer[:count] for buffer, _ in pairs], [source for _, source in pairs])
        # Columns behind a request's blocks are never read: what it can see ends with its context.
        self._table[:count, : batch.block_table_BP.shape[1]] = batch.block_table_BP


def _context_bounds(max_context: int, block_tokens: int) -> tuple[int, ...]:
    bounds = []
    bound = SMALLEST_CONTEXT
    while bound < max_context:
        bounds.append(bound)
        bound *= CONTEXT_STEP
    return tuple(-(-b // block_tokens) * block_tokens for b in (*bounds, max_context))
