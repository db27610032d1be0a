# SPDX-License-Identifier: Apache-2.0
"""What changes logits before a draw: grammar masks, logit bias, penalties for repetition, and end ids that may not come yet.

Everything is derived from the token table at the moment of the draw. There are no running counts to keep in step with preemption,
look-ahead or rejected drafts. All functions change `logits_LV` in place or replace it; the caller owns a copy.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from whalefall.kernels import sampling as ops
from whalefall.runtime.sampling.params import RowParams


def shape_logits(logits_LV: Tensor, rows: RowParams, selected: np.ndarray, token_table: Tensor) -> Tensor:
    """Grammar masks, then bias, then penalties, then bans, for the selected rows. What one step forbids no later one allows.

    Args:
        logits_LV: float32 [len(selected), V], owned by the caller.
        selected: int64, which rows of `rows` these are, ascending.
        token_table: int32 [num_slots, positions] on the device of the logits.
    """
    place = np.full(len(rows.slot_L), -1)
    place[selected] = np.arange(len(selected))
    _mask(logits_LV, rows, place)
    _add_biases(logits_LV, rows, place)
    logits_LV = _penalise(logits_LV, rows, selected, token_table)
    _ban(logits_LV, rows, place)
    return logits_LV


def _mask(logits_LV: Tensor, rows: RowParams, place: np.ndarray) -> None:
    if rows.grammar is None:
        return
    here_M = place[rows.grammar.row_M]
    chosen = np.flatnonzero(here_M >= 0)
    if len(chosen):
        index = _to(here_M[chosen], logits_LV)
        logits_LV[index] = ops.apply_bitmask(logits_LV[index], _to(rows.grammar.bits_MW[chosen], logits_LV))


def _add_biases(logits_LV: Tensor, rows: RowParams, place: np.ndarray) -> None:
    if not rows.biases:
        return
    row_X = np.concatenate([np.full(len(ids), place[row]) for row, ids, _ in rows.biases])
    id_X = np.concatenate([ids for _, ids, _ in rows.biases])
    bias_X = np.concatenate([values for *_, values in rows.biases])
    index = (_to(row_X, logits_LV), _to(id_X, logits_LV))
    logits_LV[index] += _to(bias_X, logits_LV)  # ids of a row are distinct: no two additions meet


def _penalise(logits_LV: Tensor, rows: RowParams, selected: np.ndarray, token_table: Tensor) -> Tensor:
    penalised = np.flatnonzero(rows.has_penalties_L[selected])
    if not len(penalised):
        return logits_LV
    chosen = selected[penalised]
    position_L1 = _to(rows.position_L[chosen], logits_LV)[:, None]
    num_prompt_L1 = _to(rows.num_prompt_L[chosen], logits_LV)[:, None]
    position_C = torch.arange(int(rows.position_L[chosen].max()), device=logits_LV.device)
    ids_LC = token_table[_to(rows.slot_L[chosen], logits_LV), : len(position_C)]
    is_known_LC = position_C < position_L1
    vocab_size = logits_LV.shape[-1]
    output_LV = ops.count_tokens(ids_LC, is_known_LC & (position_C >= num_prompt_L1), vocab_size)
    seen_LV = (output_LV > 0) | (ops.count_tokens(ids_LC, is_known_LC & (position_C < num_prompt_L1), vocab_size) > 0)
    strength = [_to(column[chosen], logits_LV) for column in (rows.presence_L, rows.frequency_L, rows.repetition_L)]
    index = _to(penalised, logits_LV)
    logits_LV[index] = ops.penalise(logits_LV[index], output_LV, seen_LV, *strength)
    return logits_LV


def _ban(logits_LV: Tensor, rows: RowParams, place: np.ndarray) -> None:
    if not rows.bans:
        return
    row_X = np.concatenate([np.full(len(ids), place[row]) for row, ids in rows.bans])
    id_X = np.concatenate([ids for _, ids in rows.bans])
    logits_LV[_to(row_X, logits_LV), _to(id_X, logits_LV)] = -math.inf


def _to(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device, non_blocking=True)
