# SPDX-License-Identifier: Apache-2.0
"""ForwardBatch: the tensors one forward sees. Made by the batch builder, read by the model.

Tokens of all requests lie end to end (T rows); rows of one request are consecutive positions in order. A decoding request has one row, or
1 + k with drafts: its latest token, then k guesses, each judged by the logits of the row before it. A step has two row sets: *encoder*
rows (all of them) and *decoder* rows (decode rows and the tail of each prompt). In exact mode the two are the same object. A model
without the split uses `encoder` for everything and `decoder_rows_D` is None.

A model derives whatever index tensors it needs from this once per step; it must not read back to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # naming a tensor must not cost the seconds that importing torch takes
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSet:
    """Some rows of a step: T rows over B requests, request by request."""

    positions_T: Tensor
    """int64 absolute positions."""
    request_T: Tensor
    """int64 index of the row's request in the step, 0..B-1."""
    first_row_B: Tensor
    """int64 index of the request's first row in this set (of where it would be, when it has none)."""
    start_B: Tensor
    """int64 position of the request's first row in this set."""
    window_start_B: Tensor
    """int64 lowest position that windows of these rows may see."""
    num_rows: int
    max_rows: int
    """Most rows any single request has here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    input_ids_T: Tensor
    """int64, encoder rows."""
    history_BH: Tensor
    """int64 ids of the H tokens before each request's first encoder row, nearest first; -1 before the start of the sequence."""
    encoder: RowSet
    decoder: RowSet
    decoder_rows_D: Tensor | None
    """int64 indexes of the decoder rows among the encoder rows; None when they are the same rows (window_start_B may still differ)."""
    slot_B: Tensor
    """int64 state slot of each request."""
    block_table_BP: Tensor
    """int64 physical block of each logical block; 0 (the null block) beyond the request's end."""
    context_B: Tensor
    """int64 tokens of the request once this step is done."""
    write_start_B: Tensor
    """int64 position below which growing caches must not be written: such rows go to the null block. A multiple of the block size."""
    max_context: int
    """Largest entry of context_B (host integer, for tile sizes)."""
    logit_rows_L: Tensor
    """int64 indexes among the decoder rows of the rows whose logits are wanted. With drafts, several of one request, in order."""

    @property
    def num_requests(self) -> int:
        return self.slot_B.shape[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheTensors:
    """The pools that a CacheSpec asked for, by field name."""

    growing: Mapping[str, Tensor]
    """[num_blocks * entries_per_block, width]."""
    rings: Mapping[str, Tensor]
    """[num_slots, rows, width]."""
    tags: Mapping[str, Tensor]
    """Ring group -> int32 [num_slots, rows], absolute position of the row, -1 = empty. Reset when a slot gets a new request."""
    states: Mapping[str, Tensor]
    """[num_slots, *shape]."""
    block_tokens: int
    snapshots: Mapping[str, Tensor] = field(default_factory=dict)
    """Ring or state -> [num_blocks, ...]: its content where the block ends. Empty unless `replay` is exact with a prefix cache."""


class DraftChooser(Protocol):
    """Draws drafted tokens as a request's own sampler would, from a random stream of its own. Given by the runtime."""

    def __call__(self, logits_RV: Tensor, index: int) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            logits_RV: float32, the drafter's opinion on draft `index` (0-based) of every request.
        Returns:
            ids_R: int64. probs_RV: float32, the distribution each was drawn from, after temperature, top-k, top-p and min-p (one-hot for
            a greedy row); None when nobody needs it. Hand it back in `Drafts.probs_RKV`.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRequests:
    """For whom drafts are wanted: R requests that drew a token in this step. Device tensors."""

    slot_R: Tensor
    """int64 state slots."""
    position_R: Tensor
    """int64 position of the latest token (the "golden" one): known, and not yet a row of the model. Rows below it are in the caches."""
    latest_id_R: Tensor
    """int64, the token at position_R."""
    token_ids_SP: Tensor
    """int32 [slot, position]: every known token; what stands beyond position_R means nothing."""
    max_position: int
    """Host integer, at least the largest of position_R."""
    choose: DraftChooser


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafts:
    """K guesses for each of R requests; draft i is for position_R + 1 + i."""

    ids_RK: Tensor
    """int64; -1: no guess from here on. A draft behind the first -1 is never looked at."""
    probs_RKV: Tensor | None = None
    """float32, what each id was drawn from; None for a deterministic drafter (all of the probability on the id). Needed for rejection
    sampling; requests that are greedy never look at it."""
    confidence_RK: Tensor | None = None
    """float32 in [0, 1], how likely draft i is accepted if those before it were. Entry i may depend on drafts before i alone, not on i."""
