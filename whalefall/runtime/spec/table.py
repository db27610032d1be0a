# SPDX-License-Identifier: Apache-2.0
"""The drafts that stand for each slot's next step, and how the latest drafts of a slot fared.

Both are made on the device by one step and needed by the next. The host needs only counts: they are copied behind the step, and read
when the next step with drafts is laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from whalefall.core.batch import Drafts

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """Counts of one step that the host has not read: [2, R] accepted and drafted."""

    slot_R: IntArray
    num_planned_R: IntArray
    counts_2R: Tensor
    confidence_RK: Tensor | None
    ready: torch.cuda.Event | None


class DraftTable:
    def __init__(self, num_slots: int, max_drafts: int, device: torch.device) -> None:
        self.ids_SK = torch.full((num_slots, max_drafts), -1, dtype=torch.int64, device=device)
        """[slot, place]; -1 from the end of a slot's drafts on."""
        self.probs_SKV: Tensor | None = None
        """float32, what they were drawn from; made when a drafter first gives any."""
        self.confidence_SK: Tensor | None = None
        self._num_drafts = np.zeros(num_slots, np.int64)
        self._num_refused = np.zeros(num_slots, np.int64)
        self._is_fresh = np.ones(num_slots, np.bool_)
        self._confidence_SK = np.zeros((num_slots, max_drafts), np.float64)
        self._on_its_way: _OnItsWay | None = None

    def clear(self, slot: int) -> None:
        """A request enters the slot."""
        self._read()
        self.ids_SK[slot] = -1
        self._num_drafts[slot] = self._num_refused[slot] = 0
        self._is_fresh[slot] = True

    def num_drafts(self, slot: int) -> int:
        self._read()
        return int(self._num_drafts[slot])

    def num_refused(self, slot: int) -> int:
        """Of the drafts planned for the slot's latest step that drew, how many gave no token."""
        self._read()
        return int(self._num_refused[slot])

    def is_fresh(self, slots: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Whose request has not drawn a token yet."""
        self._read()
        return self._is_fresh[np.asarray(slots, np.int64)]

    def confidences(self, slots: Sequence[int]) -> npt.NDArray[np.float64] | None:
        """Of the drafts that stand for these slots, [R, K]; None for a drafter that says nothing."""
        self._read()
        return None if self.confidence_SK is None else self._confidence_SK[np.asarray(slots, np.int64)]

    def put(self, slot_R: Tensor, drafts: Drafts | None) -> Tensor:
        """Replace the drafts of these slots; how many each has now: int64 [R]."""
        if drafts is None:
            self.ids_SK[slot_R] = -1
            return torch.zeros_like(slot_R)
        num_R = (drafts.ids_RK >= 0).long().cumprod(-1).sum(-1)
        width = drafts.ids_RK.shape[1]
        ids_RK = torch.where(torch.arange(width, device=slot_R.device) < num_R[:, None], drafts.ids_RK, -1)
        self.ids_SK[slot_R] = torch.nn.functional.pad(ids_RK, (0, self.ids_SK.shape[1] - width), value=-1)
        if drafts.probs_RKV is not None:
            if self.probs_SKV is None:
                self.probs_SKV = drafts.probs_RKV.new_zeros((*self.ids_SK.shape, drafts.probs_RKV.shape[-1]))
            self.probs_SKV[slot_R, :width] = drafts.probs_RKV
        if drafts.confidence_RK is not None:
            if self.confidence_SK is None:
                self.confidence_SK = drafts.confidence_RK.new_zeros(self.ids_SK.shape)
            self.confidence_SK[slot_R, :width] = drafts.confidence_RK
        return num_R

    def note(self, slot_R: IntArray, num_planned_R: IntArray, num_accepted_R: Tensor, num_drafts_R: Tensor) -> None:
        """How the step's drafts fared and how many stand for the next one; the host copy starts now."""
        self._read()
        counts_2R, confidence_RK, ready = torch.stack((num_accepted_R, num_drafts_R)), None, None
        if self.confidence_SK is not None:
            confidence_RK = self.confidence_SK[torch.from_numpy(slot_R).to(self.confidence_SK.device, non_blocking=True)]
        if counts_2R.is_cuda:
            counts_2R, confidence_RK = _to_host(counts_2R), None if confidence_RK is None else _to_host(confidence_RK)
            ready = torch.cuda.Event()
            ready.record()
        self._on_its_way = _OnItsWay(slot_R, num_planned_R, counts_2R, confidence_RK, ready)

    def _read(self) -> None:
        coming, self._on_its_way = self._on_its_way, None
        if coming is None:
            return
        if coming.ready is not None:
            coming.ready.synchronize()
        num_accepted_R, num_drafts_R = coming.counts_2R.numpy()
        self._num_refused[coming.slot_R] = coming.num_planned_R - num_accepted_R
        self._num_drafts[coming.slot_R] = num_drafts_R
        self._is_fresh[coming.slot_R] = False
        if coming.confidence_RK is not None:
            self._confidence_SK[coming.slot_R] = coming.confidence_RK.numpy()


def _to_host(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
