# SPDX-License-Identifier: Apache-2.0
"""RingStep: one step's use of a group of window rings, writes and reads, by absolute position.

A ring row carries the position it holds (its tag) and a read checks the tag; a row that should be there and is not becomes an absent
key and is counted. Two ways lead to the same keys:

* *direct*: no row of this step overwrites one that a query of this step still sees, so the step writes first and reads the pool alone.
  This is decode.
* *joined*: a long chunk would overwrite its own past. The requests' rings and the step's new rows are joined into one tensor, read there,
  and only the newest rows of each request go back to the ring.

Built once per step and group; `source` is then called by every layer of the group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.core.batch import RowSet
from whalefall.kernels.kv_store import store_rows


class RingStep:
    def __init__(self, writers: RowSet, slot_B: Tensor, tags_SR: Tensor, window: int) -> None:
        """
        Args:
            writers: the rows whose values enter the rings in this step; consecutive positions per request.
            slot_B: state slot of each request.
            tags_SR: int32 position held by each ring row, -1 = empty; updated here.
            window: rows a query sees, itself included.
        """
        ring_rows = tags_SR.shape[1]
        assert ring_rows >= window - 1, f"ring of {ring_rows} rows cannot serve a window of {window}"
        self._writers, self._slot_B, self._ring_rows, self._window = writers, slot_B, ring_rows, window
        self.is_direct = writers.max_rows <= ring_rows - window + 1
        self._tags_BR = None if self.is_direct else tags_SR[slot_B]
        self._kept_rows: Tensor | None = None
        slot_T, position_T = slot_B[writers.request_T], writers.positions_T
        if writers.max_rows > ring_rows:
            # Two rows of one request would meet in one ring row: the newest ring_rows of each request survive.
            ends_B = torch.zeros_like(slot_B).scatter_reduce(0, writers.request_T, position_T + 1, "amax", include_self=True)
            self._kept_rows = (position_T >= ends_B[writers.request_T] - ring_rows).nonzero().squeeze(1)
            slot_T, position_T = slot_T[self._kept_rows], position_T[self._kept_rows]
        self._target_T = slot_T * ring_rows + position_T % ring_rows
        tags_SR.view(-1)[self._target_T] = position_T.int()
        self._tags_SR = tags_SR
        self.num_mismatches = torch.zeros((), dtype=torch.int64, device=slot_B.device)
        """Rows that a window should have held and did not."""

    def source(self, ring_SRD: Tensor, new_TD: Tensor) -> Tensor:
        """Write the step's rows into one layer's ring and give the rows [M, D] that `index` points into."""
        flat_MD = ring_SRD.view(-1, ring_SRD.shape[-1])
        joined_MD = None
        if not self.is_direct:
            new_TD = new_TD.to(ring_SRD.dtype)
            joined_MD = torch.cat((ring_SRD[self._slot_B].flatten(0, 1), new_TD))
        store_rows(flat_MD, self._target_T, new_TD if self._kept_rows is None else new_TD[self._kept_rows])
        return flat_MD if joined_MD is None else joined_MD

    def index(self, queries: RowSet, first_visible_B: Tensor, max_context: int) -> Tensor:
        """int64 [T, min(window, max_context)]: row of each window position in `source`, oldest first, -1 = absent.

        Args:
            queries: rows of this step that look; their positions must not exceed the writers'.
            first_visible_B: lowest position that queries of each request may see.
            max_context: longest sequence of the step.
        """
        width = min(self._window, max_context)
        request_T1 = queries.request_T[:, None]
        position_TW = queries.positions_T[:, None] + torch.arange(1 - width, 1, device=queries.positions_T.device)
        visible_TW = position_TW >= first_visible_B[request_T1]
        ring_row_TW = position_TW % self._ring_rows
        if self._tags_BR is None:
            slot_T1 = self._slot_B[request_T1]
            held_TW = self._tags_SR[slot_T1, ring_row_TW] == position_TW
            row_TW = slot_T1 * self._ring_rows + ring_row_TW
        else:
            is_new_TW = position_TW >= self._writers.start_B[request_T1]
            held_TW = is_new_TW | (self._tags_BR[request_T1, ring_row_TW] == position_TW)
            new_row_TW = position_TW - self._writers.start_B[request_T1] + self._writers.first_row_B[request_T1]
            old_row_TW = request_T1 * self._ring_rows + ring_row_TW
            row_TW = torch.where(is_new_TW, new_row_TW + self._tags_BR.numel(), old_row_TW)
        self.num_mismatches += (visible_TW & ~held_TW).sum()
        return torch.where(visible_TW & held_TW, row_TW, -1)
