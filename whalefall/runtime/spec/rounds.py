# SPDX-License-Identifier: Apache-2.0
"""Speculation in the worker's step: lay out the drafts as rows, judge them, draft anew.

    settle(steps)   how many drafts each request really verifies, and where its rows really begin  before the batch is built
    place(steps)    drafts into the token table, behind the latest token
    judge(logits)   tokens of the step                                                             after the forward
    draft(...)      drafts for the next step                                                       after the tokens stand in the table

A plan made one step ahead names upper bounds (core/plan.py). `settle` needs two small numbers per request of the step before: on a CPU they
are there, on a GPU it waits for that step. Where a plan holds neither drafts nor requests unsure of their length, nothing is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from whalefall.core.batch import CacheTensors, DraftRequests
from whalefall.core.plan import RequestStep
from whalefall.core.seams import Drafter
from whalefall.kernels import sampling as ops
from whalefall.runtime.sampling.params import RowParams, SlotParams
from whalefall.runtime.sampling.sampler import filtered
from whalefall.runtime.spec.budget import DraftBudget
from whalefall.runtime.spec.costs import CostTable
from whalefall.runtime.spec.table import DraftTable
from whalefall.runtime.spec.verify import Acceptance, Blocks, Judged, judge

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecConfig:
    num_drafts: int
    """Per request and step, at most."""
    acceptance: Acceptance = "exact"
    is_adaptive: bool = False
    """How many drafts are verified, and of whom, is decided step by step (budget.py); `num_drafts` is the most."""
    costs_path: Path | None = None
    """Where an adaptive run keeps what steps cost."""


@dataclass(frozen=True, slots=True)
class _Allotted:
    """What a step verified, for learning from it."""

    slots: tuple[int, ...]
    product_RK: npt.NDArray[np.float64]
    num_verified_R: IntArray


class Rounds:
    def __init__(self, drafter: Drafter, config: SpecConfig, params: SlotParams, token_table: Tensor) -> None:
        assert 1 <= config.num_drafts <= min(drafter.max_draft_tokens, ops.MAX_BLOCK), f"{config.num_drafts} drafts"
        self.config = config
        self._drafter = drafter
        self._params = params
        self._token_table = token_table
        self._table = DraftTable(token_table.shape[0], config.num_drafts, token_table.device)
        self._num_planned: dict[int, int] = {}
        self._budget: DraftBudget | None = None
        if config.is_adaptive:
            self._budget = DraftBudget(config.num_drafts, CostTable(config.costs_path), time.monotonic)
        self._allotted: _Allotted | None = None

    def admit(self, slot: int) -> None:
        self._table.clear(slot)

    def settle(self, steps: Sequence[RequestStep]) -> tuple[RequestStep, ...]:
        """The same steps with the rows that are really run."""
        if self._budget is not None:
            self._learn(self._budget)
        self._num_planned = {step.slot: step.num_drafts for step in steps if step.samples}
        settled = tuple(self._settled(step) if step.num_drafts or step.num_unsure else step for step in steps)
        return settled if self._budget is None else self._allot(self._budget, settled)

    def place(self, steps: Sequence[RequestStep]) -> None:
        """Write the drafts that these (settled) steps verify into the token table."""
        drafting = [(step.slot, step.start + step.num_tokens - step.num_drafts, step.num_drafts) for step in steps if step.num_drafts]
        if not drafting:
            return
        slot_R, first_R, num_R = np.array(drafting, np.int64).T
        slot_X = np.repeat(slot_R, num_R)
        place_X = np.arange(num_R.sum()) - np.repeat(np.cumsum(num_R) - num_R, num_R)
        host_3X = torch.from_numpy(np.stack((slot_X, place_X, np.repeat(first_R, num_R) + place_X)))
        slot_on_X, place_on_X, position_on_X = host_3X.to(self._token_table.device, non_blocking=True)
        self._token_table[slot_on_X, position_on_X] = self._table.ids_SK[slot_on_X, place_on_X].to(torch.int32)

    def drafts_by_slot(self, steps: Sequence[RequestStep], slots: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """The drafts that these steps verify, for some slots; reads the device."""
        wanted = set(slots)
        return {s.slot: self._table.ids_SK[s.slot, : s.num_drafts].tolist() for s in steps if s.num_drafts and s.slot in wanted}

    def judge(self, logits_LV: Tensor, rows: RowParams, blocks: Blocks) -> Judged:
        table = self._table
        return judge(logits_LV, rows, blocks, table.ids_SK, table.probs_SKV, self._token_table, self.config.acceptance)

    def draft(self, rows: RowParams, blocks: Blocks, judged: Judged, cache: CacheTensors) -> None:
        """Draft for the requests that drew tokens, and note how this step's drafts fared. The tokens stand in the token table."""
        first_R = blocks.first_R
        wanting = np.flatnonzero(self._params.use_drafts[blocks.slot_R])
        device = judged.ids_L.device
        num_drafts_R = torch.zeros_like(judged.num_new_R)
        if len(wanting):
            first, slot = first_R[wanting], blocks.slot_R[wanting]
            host_4R = torch.from_numpy(np.stack((wanting, first, rows.position_L[first], slot)))
            wanting_R, first_on_R, position_R, slot_R = host_4R.to(device, non_blocking=True)
            last_R = judged.num_new_R[wanting_R] - 1
            requests = DraftRequests(
                slot_R=slot_R,
                position_R=position_R + last_R,
                latest_id_R=judged.ids_L[first_on_R + last_R],
                token_ids_SP=self._token_table,
                max_position=int((rows.position_L[first] + blocks.num_rows_R[wanting] - 1).max()),
                choose=_Chooser(rows, first, position_R + last_R, self.config.acceptance),
            )
            wants_drafts = self._budget is None or self._budget.wants_drafts
            drafts = self._drafter.draft(requests, cache, self.config.num_drafts) if wants_drafts else None
            num_drafts_R[wanting_R] = self._table.put(slot_R, drafts)
        planned = np.array([self._num_planned[slot] for slot in blocks.slot_R.tolist()], np.int64)
        self._table.note(blocks.slot_R, planned, judged.num_new_R - 1, num_drafts_R)

    def _settled(self, step: RequestStep) -> RequestStep:
        num_drafts = min(step.num_drafts, self._table.num_drafts(step.slot))
        start = step.start - (self._table.num_refused(step.slot) if step.num_unsure else 0)
        return step._replace(start=start, num_tokens=step.num_tokens - step.num_drafts + num_drafts, num_drafts=num_drafts)

    def _allot(self, budget: DraftBudget, steps: tuple[RequestStep, ...]) -> tuple[RequestStep, ...]:
        """The same steps with as many drafts as pay."""
        mine = [i for i, step in enumerate(steps) if step.samples and self._params.use_drafts[step.slot]]
        if not mine:
            return steps
        slots = tuple(steps[i].slot for i in mine)
        confidence_RK = self._table.confidences(slots)
        product_RK = budget.products(confidence_RK, np.array([steps[i].num_drafts for i in mine], np.int64))
        is_decode = all(step.samples and step.num_tokens == 1 + step.num_drafts for step in steps)
        num_R = budget.allot(product_RK, is_decode=is_decode, has_confidence=confidence_RK is not None)
        self._allotted = _Allotted(slots, product_RK, num_R)
        changed = list(steps)
        for i, num in zip(mine, num_R.tolist()):
            step = steps[i]
            changed[i] = step._replace(num_tokens=step.num_tokens - step.num_drafts + num, num_drafts=num)
        return tuple(changed)

    def _learn(self, budget: DraftBudget) -> None:
        done, self._allotted = self._allotted, None
        if done is None:
            return
        num_refused_R = np.array([self._table.num_refused(slot) for slot in done.slots], np.int64)
        num_planned_R = np.array([self._num_planned.get(slot, 0) for slot in done.slots], np.int64)
        # A slot that changed hands was cleared: it counts as having verified nothing.
        num_verified_R = np.where(self._table.is_fresh(done.slots), 0, done.num_verified_R)
        budget.learn(done.product_RK, num_verified_R, num_planned_R - num_refused_R)


class _Chooser:
    """DraftChooser of one call: temperature, top-k, top-p and min-p of each request; a random stream apart from the target's.

    Under exact acceptance it draws with the target's own random numbers instead: where the drafter thinks like the target it then draws the
    same token, and nothing can go wrong, for a draft only ever stays if it is what the target draws by itself.
    """

    def __init__(self, rows: RowParams, first_R: IntArray, position_R: Tensor, acceptance: Acceptance) -> None:
        self._rows, self._first_R = rows, first_R
        self._position_R = position_R
        self._acceptance = acceptance
        self._hot = np.flatnonzero(rows.temperature_L[first_R] > 0)

    def __call__(self, logits_RV: Tensor, index: int) -> tuple[Tensor, Tensor | None]:
        ids_R, best_R = ops.argmax(logits_RV)
        if not len(self._hot):
            return ids_R, None
        device = logits_RV.device
        chosen = self._first_R[self._hot]
        hot_R, seed_R = (torch.from_numpy(a).to(device, non_blocking=True) for a in (self._hot, self._rows.seed_L[chosen]))
        logits_XV = filtered(logits_RV[hot_R] - best_R[hot_R, None], self._rows, chosen)
        is_exact = self._acceptance == "exact"
        purpose = int(ops.Purpose.TARGET) if is_exact else ops.block_purpose(ops.Purpose.DRAFT, index)
        ids_R[hot_R] = ops.draw(logits_XV, seed_R, self._position_R[hot_R] + 1 + index, purpose)
        if is_exact:
            return ids_R, None
        probs_RV = torch.zeros_like(logits_RV).scatter_(1, ids_R[:, None], 1.0)
        probs_RV[hot_R] = logits_XV.softmax(-1)
        return ids_R, probs_RV
