# SPDX-License-Identifier: Apache-2.0
"""StepIndex: everything index-like that V4.1's layers share within one step, derived once from the ForwardBatch.

Two row sets: encoder rows run through the encoder and write the border layer's caches; decoder rows run through the rest. In exact mode the
two are one object.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whalefall.core.batch import CacheTensors, ForwardBatch, RowSet
from whalefall.kernels.rope import angles
from whalefall.layers.window import RingStep
from whalefall.models.deepseek_v41.cache import DECODER_RING, ENCODER_RING, pending_group
from whalefall.models.deepseek_v41.config import DeepseekV41Config

Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Frequencies of the two rotations of the model, float32 [qk_rope_head_dim / 2]."""

    plain_F: Tensor
    """Layers of ratio 0 and draft layers."""
    long_F: Tensor
    """Every vector of layers with ratio > 0."""


@dataclass(frozen=True, slots=True)
class View:
    """What the queries of one row set need; one per row set, and one for the border layer's queries."""

    rows: RowSet
    plain: Angles
    long: Angles
    ring: RingStep
    """The rings that the layers of this view write."""
    window_index_TW: Tensor
    """Rows of the ring's source that each query sees."""


@dataclass(frozen=True, slots=True)
class GroupStep:
    """Where compressed entries of one ratio go in this step; rows are encoder rows."""

    first_angles: Angles
    """Rotation at the position of the group's first token."""
    pending: RingStep | None
    """Open groups; None for ratio 1."""
    members_Tr: Tensor | None
    """Rows of the group's tokens in the pending source; None for ratio 1."""
    target_T: Tensor
    """Pool row of the entry that closes at this token; the null block where none does, and for rows replayed over adopted blocks."""
    entries_per_block: int


class StepIndex:
    def __init__(self, config: DeepseekV41Config, batch: ForwardBatch, cache: CacheTensors, rope: RopeTables) -> None:
        self.batch = batch
        encoder_ring = RingStep(batch.encoder, batch.slot_B, cache.tags[ENCODER_RING], config.sliding_window)
        decoder_ring = RingStep(batch.decoder, batch.slot_B, cache.tags[DECODER_RING], config.sliding_window)
        self.encoder = _view(batch.encoder, rope, encoder_ring, batch.encoder.window_start_B, batch.max_context)
        self.border = self.encoder
        """The border layer: decoder rows that look into windows written by all rows."""
        decoder_long = self.encoder.long
        if batch.decoder_rows_D is not None:
            self.border = _view(batch.decoder, rope, encoder_ring, batch.encoder.window_start_B, batch.max_context)
            decoder_long = self.border.long
        self.decoder = View(
            batch.decoder,
            self.border.plain,
            decoder_long,
            decoder_ring,
            decoder_ring.index(batch.decoder, batch.decoder.window_start_B, batch.max_context),
        )
        self._rings = [encoder_ring, decoder_ring]
        self._num_lost_members = torch.zeros((), dtype=torch.int64, device=batch.slot_B.device)
        self.groups: dict[int, GroupStep] = {}
        for ratio in sorted({config.ratio(layer) for layer in config.kv_source_layer_ids}):
            self.groups[ratio] = self._group(ratio, cache, rope)

    def num_visible(self, rows: RowSet, ratio: int) -> Tensor:
        """int64 [T]: entries whose whole group lies at or before the row."""
        return (rows.positions_T + 1) // ratio

    def max_visible(self, ratio: int) -> int:
        return self.batch.max_context // ratio

    def entry_rows(self, request_T: Tensor, entry_TK: Tensor, ratio: int) -> Tensor:
        """Pool rows of logical entries; -1 stays -1."""
        per_block = self.groups[ratio].entries_per_block
        entry = entry_TK.clamp_min(0)
        block_TK = self.batch.block_table_BP[request_T[:, None], entry // per_block]
        return torch.where(entry_TK < 0, -1, block_TK * per_block + entry % per_block)

    def num_mismatches(self) -> Tensor:
        """Ring reads of this step whose tag did not match; anything but 0 is a fault of the bookkeeping above."""
        return torch.stack([ring.num_mismatches for ring in self._rings]).sum() + self._num_lost_members

    def _group(self, ratio: int, cache: CacheTensors, rope: RopeTables) -> GroupStep:
        rows, table_BP = self.batch.encoder, self.batch.block_table_BP
        per_block = cache.block_tokens // ratio
        entry_T = rows.positions_T // ratio
        row_T = table_BP[rows.request_T, entry_T // per_block] * per_block + entry_T % per_block
        write_start_B = self.batch.write_start_B
        closes_T = ((rows.positions_T + 1) % ratio == 0) & (rows.positions_T >= write_start_B[rows.request_T])
        pending = members_Tr = None
        if ratio > 1:
            pending = RingStep(rows, self.batch.slot_B, cache.tags[pending_group(ratio)], ratio)
            # A group that does not end here may reach before the sequence: its members are never used. None is open where writing starts.
            members_Tr = pending.index(rows, write_start_B, max(ratio, self.batch.max_context))
            self._num_lost_members += (closes_T[:, None] & (members_Tr < 0)).sum()
            members_Tr = torch.where(closes_T[:, None], members_Tr, members_Tr[:, -1:])
        return GroupStep(
            first_angles=angles((rows.positions_T - (ratio - 1)).clamp_min(0), rope.long_F),
            pending=pending,
            members_Tr=members_Tr,
            target_T=torch.where(closes_T, row_T, 0),
            entries_per_block=per_block,
        )


def _view(rows: RowSet, rope: RopeTables, ring: RingStep, first_visible_B: Tensor, max_context: int) -> View:
    return View(
        rows,
        angles(rows.positions_T, rope.plain_F),
        angles(rows.positions_T, rope.long_F),
        ring,
        ring.index(rows, first_visible_B, max_context),
    )
