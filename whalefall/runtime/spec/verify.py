# SPDX-License-Identifier: Apache-2.0
"""Which drafts stay, and the token behind them, for all requests of a step.

Three ways, of which none lets the drafts change what is drawn:

* *exact*: every row draws its token as if nothing had been drafted, with the same random numbers. A draft stays where it is that token.
  The answer of a seed is token for token the one without speculation. For greedy requests, and for drafters that are sure of what
  they say (no probabilities), this is rejection sampling itself.
* *standard*, *block*: rejection sampling against the probabilities of the drafter, draft by draft or jointly. More drafts stay; the
  answer of a seed is another one, with the same distribution.

A row that the model spoilt (NaN) behind accepted drafts is not looked at now: the drafts before it are given out, and the next step, whose
first row it is, ends the request as it would have ended without speculation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from whalefall.kernels import sampling as ops
from whalefall.runtime.sampling.params import RowParams
from whalefall.runtime.sampling.sampler import MAX_TILE_ELEMENTS, TILE_ELEMENTS, Fault, sample, target_probabilities

Acceptance: TypeAlias = Literal["exact", "standard", "block"]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Blocks:
    """R requests, each with a row for its latest token and one behind each draft; their rows stand end to end (L rows)."""

    slot_R: IntArray
    num_rows_R: IntArray

    @property
    def first_R(self) -> IntArray:
        return np.cumsum(self.num_rows_R) - self.num_rows_R

    @property
    def max_rows(self) -> int:
        return int(self.num_rows_R.max(initial=1))

    def padded(self) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """[R, M] row of each place (the request's last one behind its end), and whether it is one of the request's."""
        place_M = np.arange(self.max_rows)
        row_RM = self.first_R[:, None] + np.minimum(place_M, self.num_rows_R[:, None] - 1)
        return row_RM, place_M < self.num_rows_R[:, None]


@dataclass(frozen=True, slots=True)
class Judged:
    """Tokens of L rows, of which each request takes the first `num_new_R` of its own."""

    ids_L: Tensor
    """int64, in range everywhere."""
    num_new_R: Tensor
    """int64, at least 1."""
    fault_R: Tensor
    """uint8 `Fault` of the request."""


def judge(
    logits_LV: Tensor,
    rows: RowParams,
    blocks: Blocks,
    ids_SK: Tensor,
    probs_SKV: Tensor | None,
    token_table: Tensor,
    acceptance: Acceptance,
) -> Judged:
    """
    Args:
        logits_LV: float32, raw; the drafts stand in the token table, so penalties count those before each row.
        ids_SK: drafts by slot; probs_SKV: what they were drawn from, None where nobody knows.
    """
    rejecting = _rejecting(rows, blocks) if acceptance != "exact" and probs_SKV is not None else np.zeros(0, np.int64)
    row_RM, is_own_RM = blocks.padded()
    skip_L = None
    if len(rejecting):
        skip_L = np.zeros(len(rows.slot_L), np.bool_)
        skip_L[row_RM[rejecting].ravel()] = True
    sampled = sample(logits_LV, rows, token_table, skip_L=skip_L)
    ids_L, fault_L = sampled.ids_L, sampled.fault_L
    if blocks.max_rows == 1:
        return Judged(ids_L, torch.ones_like(ids_L), fault_L)
    device = logits_LV.device
    row_on_RM, own_on_RM = (torch.from_numpy(a).to(device, non_blocking=True) for a in (row_RM, is_own_RM))
    num_kept_R = _matching(ids_L[row_on_RM], _drafts_of(blocks, ids_SK, own_on_RM))
    if probs_SKV is not None:
        for part in _tiles(rejecting, blocks, logits_LV):
            _reject(logits_LV, rows, part, blocks, ids_SK, probs_SKV, token_table, acceptance, (ids_L, fault_L, num_kept_R))
    fault_RM = torch.where(own_on_RM, fault_L[row_on_RM], 0)
    num_sound_R = (fault_RM == int(Fault.NONE)).long().cumprod(-1).sum(-1)
    num_new_R = torch.minimum(num_kept_R + 1, num_sound_R.clamp_min(1))
    return Judged(ids_L, num_new_R, fault_RM[:, 0])


def _rejecting(rows: RowParams, blocks: Blocks) -> IntArray:
    """Requests with drafts that draw with a temperature."""
    return np.flatnonzero((blocks.num_rows_R > 1) & (rows.temperature_L[blocks.first_R] > 0))


def _drafts_of(blocks: Blocks, ids_SK: Tensor, is_own_RM: Tensor) -> Tensor:
    """int64 [R, M - 1], -1 where the step has no row behind the draft."""
    slot_R = torch.from_numpy(blocks.slot_R).to(ids_SK.device, non_blocking=True)
    return torch.where(is_own_RM[:, 1:], ids_SK[slot_R, : blocks.max_rows - 1], -1)


def _matching(ids_RM: Tensor, drafts_RK: Tensor) -> Tensor:
    return ((ids_RM[:, :-1] == drafts_RK) & (drafts_RK >= 0)).long().cumprod(-1).sum(-1)


def _reject(
    logits_LV: Tensor,
    rows: RowParams,
    part: IntArray,
    blocks: Blocks,
    ids_SK: Tensor,
    probs_SKV: Tensor,
    token_table: Tensor,
    acceptance: Acceptance,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Rejection sampling for some requests; changes ids_L, fault_L and num_kept_R."""
    ids_L, fault_L, num_kept_R = out
    mine = Blocks(blocks.slot_R[part], blocks.num_rows_R[part])
    chosen = np.concatenate([np.arange(first, first + count) for first, count in zip(blocks.first_R[part], mine.num_rows_R)])
    device = logits_LV.device
    chosen_L, part_R = (torch.from_numpy(a).to(device, non_blocking=True) for a in (chosen, part))
    probs_LV, best_L = target_probabilities(logits_LV[chosen_L], rows, chosen, token_table)
    fault_L[chosen_L] = torch.where((fault_L[chosen_L] == 0) & (best_L == -torch.inf), int(Fault.ALL_FORBIDDEN), fault_L[chosen_L])
    row_RM, own_RM = (torch.from_numpy(a).to(device, non_blocking=True) for a in mine.padded())
    drafts_RK = _drafts_of(mine, ids_SK, own_RM)
    slot_R = torch.from_numpy(mine.slot_R).to(device, non_blocking=True)
    draft_RKV = probs_SKV[slot_R, : mine.max_rows - 1] * (drafts_RK >= 0)[..., None]
    first = blocks.first_R[part]
    seed_R, position_R = (torch.from_numpy(a[first]).to(device, non_blocking=True) for a in (rows.seed_L, rows.position_L))
    accept = ops.accept_block if acceptance == "block" else ops.accept_standard
    num_R, rest_RV = accept(probs_LV[row_RM], drafts_RK, draft_RKV, seed_R, position_R)
    drawn_R = torch.zeros_like(num_R)
    for place in range(mine.max_rows):  # each place has random numbers of its own
        purpose = ops.block_purpose(ops.Purpose.RESIDUAL, place)
        drawn_R = torch.where(num_R == place, ops.draw(rest_RV.log(), seed_R, position_R + place, purpose), drawn_R)
    tokens_RM = torch.nn.functional.pad(drafts_RK, (0, 1), value=0).scatter(1, num_R[:, None], drawn_R[:, None])
    ids_L[chosen_L] = tokens_RM[own_RM].clamp_min(0)
    num_kept_R[part_R] = num_R


def _tiles(rejecting: IntArray, blocks: Blocks, logits_LV: Tensor) -> list[IntArray]:
    """Requests whose probabilities are held at a time."""
    limit = TILE_ELEMENTS.get(logits_LV.device.type, MAX_TILE_ELEMENTS)
    step = max(1, limit // (logits_LV.shape[-1] * blocks.max_rows))
    return [rejecting[first : first + step] for first in range(0, len(rejecting), step)]
