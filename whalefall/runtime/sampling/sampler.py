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


def sample(logits_LV: Tensor, rows: RowParams, token_table: Tensor) -> Sampled:
    """Draw one id per row.

    Args:
        logits_LV: float32, raw, one row per entry of `rows`; not changed.
        token_table: int32 [num_slots, positions], read by penalties.
    """
    ids_L, best_L = ops.argmax(logits_LV)
    fault_L = (~torch.isfinite(best_L)).to(torch.uint8)
    selected = np.flatnonzero(~rows.is_plain_L)
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


def _draw(logits_LV: Tensor, rows: RowParams, chosen: np.ndarray) -> Tensor:
    """Draw with a temperature above 0; the best logit of every row is 0, so that no temperature can overflow."""

    def column(values_L: np.ndarray) -> Tensor:
        return torch.from_numpy(values_L[chosen]).to(logits_LV.device, non_blocking=True)

    logits_LV /= column(rows.temperature_L)[:, None]
    filtered = np.flatnonzero((rows.top_k_L[chosen] < logits_LV.shape[-1]) | (rows.top_p_L[chosen] < 1))
    if len(filtered):
        index = torch.from_numpy(filtered).to(logits_LV.device, non_blocking=True)
        logits_LV[index] = ops.keep_top(logits_LV[index], column(rows.top_k_L)[index], column(rows.top_p_L)[index])
    if (rows.min_p_L[chosen] > 0).any():
        logits_LV.masked_fill_(logits_LV < column(rows.min_p_L).log()[:, None], -math.inf)  # relative to the best: its log is 0
    return ops.draw(logits_LV, column(rows.seed_L), column(rows.position_L), int(ops.Purpose.TARGET))


def _tiles(selected: np.ndarray, logits_LV: Tensor) -> Iterator[np.ndarray]:
    step = max(1, TILE_ELEMENTS.get(logits_LV.device.type, MAX_TILE_ELEMENTS) // logits_LV.shape[-1])
    for first in range(0, len(selected), step):
        yield selected[first : first + step]
