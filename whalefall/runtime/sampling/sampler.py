# SPDX-License-Identifier: Apache-2.0
"""Choose a token for each row: grammar -> bias -> penalties -> bans -> temperature -> top-k -> top-p -> min-p -> draw.

Knows rows of logits and `RowParams`, not requests. A row's token depends on its own logits, parameters, seed and position alone. Only the
work that some row asks for is done: a step in which all are greedy is one argmax, and the vocabulary is sorted for no one but the rows
with a top-k or top-p.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from whalefall.kernels import sampling as ops
from whalefall.runtime.sampling.params import RowParams
from whalefall.runtime.sampling.penalties import shape_logits

TILE_ELEMENTS = {"cpu": 1 << 18}
"""Logits of the shaped rows handled at a time, by device type: intermediate tensors that stay in a CPU's cache are three times faster."""
MAX_TILE_ELEMENTS = 1 << 26
"""On any other device; bounds the memory for intermediate tensors."""


class Fault(IntEnum):
    """Why a row has no token."""

    NONE = 0
    NON_FINITE = 1
    """NaN or infinity came out of the model."""
    ALL_FORBIDDEN = 2
    """Grammar, bias and bans leave no id."""


@dataclass(frozen=True, slots=True)
class Sampled:
    ids_L: Tensor
    """int64; in range even for a faulty row, so that it can be written to the token table."""
    fault_L: Tensor
    """uint8 `Fault`."""


def sample(logits_LV: Tensor, rows: RowParams, token_table: Tensor, *, skip_L: npt.NDArray[np.bool_] | None = None) -> Sampled:
    """Draw one id per row.

    Args:
        logits_LV: float32, raw, one row per entry of `rows`; not changed.
        token_table: int32 [num_slots, positions], read by penalties.
        skip_L: rows that somebody else draws for; their ids mean nothing, their faults are those of the raw logits.
    """
    ids_L, best_L = ops.argmax(logits_LV)
    fault_L = (~torch.isfinite(best_L)).to(torch.uint8)
    selected = np.flatnonzero(~rows.is_plain_L if skip_L is None else ~rows.is_plain_L & ~skip_L)
    for part in _tiles(selected, logits_LV):
        part_L = torch.from_numpy(part).to(logits_LV.device, non_blocking=True)
        drawn_L, best_L = _sample_shaped(logits_LV[part_L], rows, part, token_table)
        ids_L[part_L] = drawn_L
        fault_L[part_L] = torch.where((fault_L[part_L] == 0) & (best_L == -math.inf), int(Fault.ALL_FORBIDDEN), fault_L[part_L])
    return Sampled(ids_L, fault_L)


def _sample_shaped(logits_LV: Tensor, rows: RowParams, part: np.ndarray, token_table: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, best shaped logit) of some rows; logits_LV is a copy of theirs."""
    shaped_LV = shape_logits(logits_LV, rows, part, token_table)
    ids_L, best_L = ops.argmax(shaped_LV)
    hot = np.flatnonzero(rows.temperature_L[part] > 0)
    if len(hot):
        hot_L = torch.from_numpy(hot).to(logits_LV.device, non_blocking=True)
        ids_L[hot_L] = _draw(shaped_LV[hot_L] - best_L[hot_L, None], rows, part[hot])
    return ids_L, best_L


def target_probabilities(logits_LV: Tensor, rows: RowParams, part: np.ndarray, token_table: Tensor) -> tuple[Tensor, Tensor]:
    """What `sample` would draw from, for some rows with a temperature above 0.

    Args:
        logits_LV: float32 [len(part), V], a copy that may be changed.
        part: int64, which rows of `rows` these are, ascending.
    Returns:
        probs_LV: float32; all 0 in a row where nothing is allowed. best_L: the best shaped logit, -inf in such a row.
    """
    shaped_LV = shape_logits(logits_LV, rows, part, token_table)
    best_L = ops.argmax(shaped_LV)[1]
    probs_LV = filtered(shaped_LV - best_L[:, None], rows, part).softmax(-1)
    return probs_LV.masked_fill_((best_L == -math.inf)[:, None], 0), best_L


def processed_logits(logits_LV: Tensor, rows: RowParams, part: np.ndarray, token_table: Tensor) -> Tensor:
    """The logits that some rows really choose from, what falls out at -inf; of greedy rows without temperature and filters.

    Args:
        logits_LV: float32 [len(part), V], a copy that may be changed.
    """
    shaped_LV = shape_logits(logits_LV, rows, part, token_table)
    hot = np.flatnonzero(rows.temperature_L[part] > 0)
    if len(hot):
        hot_L = torch.from_numpy(hot).to(logits_LV.device, non_blocking=True)
        hot_LV = shaped_LV[hot_L]
        shaped_LV[hot_L] = filtered(hot_LV - ops.argmax(hot_LV)[1][:, None], rows, part[hot])
    return shaped_LV


def filtered(logits_LV: Tensor, rows: RowParams, chosen: np.ndarray) -> Tensor:
    """Temperature, top-k, top-p and min-p of some rows with a temperature above 0: what falls out is -inf.

    Args:
        logits_LV: [len(chosen), V], changed; the best logit of every row is 0, so that no temperature can overflow.
    """
    logits_LV /= _column(rows.temperature_L, chosen, logits_LV)[:, None]
    cut = np.flatnonzero((rows.top_k_L[chosen] < logits_LV.shape[-1]) | (rows.top_p_L[chosen] < 1))
    if len(cut):
        index = torch.from_numpy(cut).to(logits_LV.device, non_blocking=True)
        top_k_L, top_p_L = (_column(values_L, chosen[cut], logits_LV) for values_L in (rows.top_k_L, rows.top_p_L))
        logits_LV[index] = ops.keep_top(logits_LV[index], top_k_L, top_p_L)
    if (rows.min_p_L[chosen] > 0).any():
        limit_L1 = _column(rows.min_p_L, chosen, logits_LV).log()[:, None]  # relative to the best: its log is 0
        logits_LV.masked_fill_(logits_LV < limit_L1, -math.inf)
    return logits_LV


def _draw(logits_LV: Tensor, rows: RowParams, chosen: np.ndarray) -> Tensor:
    """Draw with a temperature above 0; arguments as `filtered`."""
    seed_L, position_L = (_column(values_L, chosen, logits_LV) for values_L in (rows.seed_L, rows.position_L))
    return ops.draw(filtered(logits_LV, rows, chosen), seed_L, position_L, int(ops.Purpose.TARGET))


def _column(values_L: np.ndarray, chosen: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values_L[chosen]).to(like.device, non_blocking=True)


def _tiles(selected: np.ndarray, logits_LV: Tensor) -> Iterator[np.ndarray]:
    step = max(1, TILE_ELEMENTS.get(logits_LV.device.type, MAX_TILE_ELEMENTS) // logits_LV.shape[-1])
    for first in range(0, len(selected), step):
        yield selected[first : first + step]
