# SPDX-License-Identifier: Apache-2.0
"""FakeClock and FakeWorker: the outside of a scheduler without a model, so that simulations can check content and not only counts.

FakeWorker keeps a token table per slot and a "KV cache" of (position, token) per cell of a physical block. The next token is a checksum of
the whole history *as read back through the block table*. A wrong position, a lost token, a block with two owners or one reused too early
therefore changes the answer, or trips an assertion that names the step. `expected_answer` gives the same answer by plain recursion.
Two window rings per slot (encoder and decoder rows) are read and written the same way, with snapshots beside blocks, and a cell is written
once between two owners: so a stale window after a prefix hit, or a replay that writes where others read, is noticed too.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from whalefall.core.plan import NewRequest, RequestResult, RequestStep, StepPlan, StepResult
from whalefall.core.request import EngineRequest, FinishReason, TokenLogprobs
from whalefall.core.sampling import SamplingParams

_Entry = tuple[int, int]
"""Position and token id: what a row leaves behind."""
_Rings = tuple[dict[int, _Entry], dict[int, _Entry]]
"""Of encoder rows, of decoder rows; by ring row."""


class FakeClock:
    """Time that moves when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


def next_token(history: Sequence[int], num_prompt: int, sampling: SamplingParams, eos_ids: Sequence[int], vocab_size: int) -> int:
    """The token after `history`: a checksum of all of it and the seed; ids that end an answer are masked before min_tokens."""
    token_id = _checksum(history, sampling.seed or 0) % vocab_size
    if len(history) - num_prompt < sampling.min_tokens:
        masked = {*eos_ids, *sampling.stop_token_ids}
        assert len(masked) < vocab_size
        while token_id in masked:
            token_id = (token_id + 1) % vocab_size
    return token_id


def prompt_score(prompt: Sequence[int], position: int) -> TokenLogprobs:
    """The log-probability of a prompt token: a checksum of what stands before it."""
    logprob = -1.0 - _checksum(prompt[:position], 0) % 1_000
    return TokenLogprobs(
        token_id=prompt[position], logprob=logprob, rank=1, top_ids=None, top_logprobs=np.array([logprob], dtype=np.float32)
    )


def expected_answer(request: EngineRequest, max_context: int, vocab_size: int) -> tuple[tuple[int, ...], FinishReason]:
    """What a request must get, whatever the road: alone, without chunks, budgets or preemption."""
    sampling, prompt = request.sampling, list(request.prompt_token_ids)
    limit = max_context if sampling.max_tokens is None else min(max_context, len(prompt) + sampling.max_tokens)
    enders = {*(() if sampling.ignore_eos else request.eos_token_ids), *sampling.stop_token_ids}
    history = list(prompt)
    while len(history) < limit:
        token_id = next_token(history, len(prompt), sampling, request.eos_token_ids, vocab_size)
        may_end = len(history) - len(prompt) >= sampling.min_tokens
        history.append(token_id)
        if may_end and token_id in enders:
            return tuple(history[len(prompt) :]), FinishReason.STOP
    return tuple(history[len(prompt) :]), FinishReason.LENGTH


class BlockRecord(NamedTuple):
    """A block's content, as it travels between tiers."""

    entries: tuple[_Entry, ...]
    snapshot: tuple[int, _Rings] | None


@dataclass(eq=False)
class _Slot:
    """What the worker knows about the request in one slot."""

    new: NewRequest
    token_ids: dict[int, int]
    """By position; given ones and drawn ones."""
    num_computed: int
    block_ids: list[int] = field(default_factory=list)
    starts: tuple[int, int, int] | None = None
    """window_start, decoder_start, write_start of the first step: they stay."""
    rings: _Rings = field(default_factory=lambda: ({}, {}))
    fault: str | None = None
    """Set once; a step that was launched before the fault was known gets it again."""
    num_refused: int = 0
    """Drafts planned and not accepted in the latest step: rows of a next step planned ahead of that begin earlier by so many."""
    num_guessed: int = 0
    """End of the positions that steps with drafts have written: their cells may be written again."""


class FakeWorker:
    """Answers plans as a device would: a launch returns at once, the work is done late (when its result is waited for), in order.

    Args:
        block_tokens: as the CacheManager's.
        window: rows of a ring; 0 for a model without.
        fault_at: request id -> position; the step whose rows reach it ends with a fault of this request.
        num_spare_rows: of a ring, beyond the window: the most drafts that a step may verify.
        draft_skill: how many of 8 drafts are right; some steps have fewer drafts than were planned, or none.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        window: int = 0,
        vocab_size: int = 64,
        fault_at: Mapping[str, int] | None = None,
        num_spare_rows: int = 0,
        draft_skill: int = 5,
    ) -> None:
        self.block_tokens = block_tokens
        self.window = window
        self.ring_rows = window + num_spare_rows
        self.draft_skill = draft_skill
        self.num_rows = 0
        """Rows run so far."""
        self.vocab_size = vocab_size
        self.fault_at = dict(fault_at or {})
        self._slots: dict[int, _Slot] = {}
        self._cells: dict[int, _Entry] = {}  # by physical cell
        self._snapshots: dict[int, tuple[int, _Rings]] = {}  # block -> (where it ends, the rings there)
        self._launched: deque[FakeStepHandle] = deque()

    def launch(self, plan: StepPlan) -> FakeStepHandle:
        """Take a plan in: block tables and slots change now, rows are computed when the result is waited for."""
        assert plan.steps, f"step {plan.step_id} is empty"
        self._check_reuse(plan)
        for new in plan.new_requests:
            self._slots[new.slot] = _Slot(new, dict(enumerate(new.token_ids)), new.start)
        owners = []
        for step in plan.steps:
            slot = self._slots[step.slot]
            assert slot.new.request_id == step.request_id, f"slot {step.slot} holds {slot.new.request_id}, not {step.request_id}"
            self._clean(step.new_block_ids[max(0, step.write_start // self.block_tokens - len(slot.block_ids)) :])
            slot.block_ids.extend(step.new_block_ids)
            owners.append(slot)
        handle = FakeStepHandle(self, plan, owners)
        self._launched.append(handle)
        return handle

    def read_block(self, block_id: int) -> BlockRecord:
        """All that a block holds, for a lower tier."""
        first = block_id * self.block_tokens
        entries = tuple(self._cells[cell] for cell in range(first, first + self.block_tokens))
        return BlockRecord(entries, self._snapshots.get(block_id))

    def write_block(self, block_id: int, record: BlockRecord) -> None:
        """Fill a block that nobody reads or writes now."""
        using = {block for handle in self._launched for owner in handle.owners for block in owner.block_ids}
        assert block_id not in using, f"block {block_id} is loaded under a launched step"
        self._clean((block_id,))
        self._cells.update(enumerate(record.entries, block_id * self.block_tokens))
        if record.snapshot is not None:
            self._snapshots[block_id] = record.snapshot

    def _clean(self, block_ids: Sequence[int]) -> None:
        """Blocks that are handed out afresh hold nothing that may be read."""
        for block_id in block_ids:
            self._snapshots.pop(block_id, None)
            for cell in range(block_id * self.block_tokens, (block_id + 1) * self.block_tokens):
                self._cells.pop(cell, None)

    def _check_reuse(self, plan: StepPlan) -> None:
        """What a launched step may still touch must not be handed to anybody else, unless it is published and adopted."""
        newcomers = {new.request_id for new in plan.new_requests}
        for handle in self._launched:
            slots = {step.slot for step in handle.plan.steps}
            block_ids = {block_id for owner in handle.owners for block_id in owner.block_ids}
            for new in plan.new_requests:
                assert new.slot not in slots, f"step {plan.step_id}: slot {new.slot} is still used by step {handle.plan.step_id}"
            for step in plan.steps:
                fresh = step.new_block_ids[step.write_start // self.block_tokens if step.request_id in newcomers else 0 :]
                assert block_ids.isdisjoint(fresh), (
                    f"step {plan.step_id}: {step.request_id} got a block that step {handle.plan.step_id} still uses"
                )

    def _run(self, handle: FakeStepHandle) -> StepResult:
        assert self._launched and self._launched[0] is handle, "steps run in the order of their launch"
        results = tuple(self._run_request(step, slot) for step, slot in zip(handle.plan.steps, handle.owners, strict=True))
        self._launched.popleft()
        return StepResult(step_id=handle.plan.step_id, results=results)

    def _run_request(self, step: RequestStep, slot: _Slot) -> RequestResult:
        name = step.request_id
        if slot.fault is not None:
            return RequestResult(fault=slot.fault)
        start = step.start - slot.num_refused if step.num_unsure else step.start
        assert start == slot.num_computed, f"{name}: rows start at {start}, but {slot.num_computed} are computed"
        starts = (step.window_start, step.decoder_start, step.write_start)
        assert slot.starts in (None, starts), f"{name}: window_start, decoder_start or write_start moved"
        if slot.starts is None and slot.new.restore_block:
            self._restore(slot)
        slot.starts = starts
        end = start + step.num_tokens - step.num_drafts
        for position in range(start, end):
            self._run_row(step, slot, position)
        drafts = self._draft(slot, end, step.num_drafts)
        for position in range(end, end + len(drafts)):
            slot.token_ids[position] = drafts[position - end]
            self._run_row(step, slot, position)
        self.num_rows += end - start + len(drafts)
        slot.num_computed = end
        if step.snapshot_block:
            assert slot.block_ids[end // self.block_tokens - 1] == step.snapshot_block and end % self.block_tokens == 0
            encoder, decoder = slot.rings
            self._snapshots[step.snapshot_block] = (end, (dict(encoder), dict(decoder)))
        fault_at = self.fault_at.get(name)
        if fault_at is not None and start <= fault_at < end:
            slot.fault = f"non-finite logits at position {fault_at}"
            return RequestResult(fault=slot.fault)
        history = [self._read(slot, position, name) for position in range(end)]
        token_ids: tuple[int, ...] = ()
        if step.samples:
            assert end - 1 >= step.decoder_start, f"{name}: the row that samples is no decoder row"
            token_ids = self._verify(slot, history, drafts)
            slot.token_ids.update(enumerate(token_ids, end))
            slot.num_computed = end + len(token_ids) - 1
            slot.num_refused = step.num_drafts + 1 - len(token_ids)
        scores = self._score(step, slot, end) if step.wants_prompt_logprobs else None
        return RequestResult(token_ids=token_ids, prompt_logprobs=scores, num_drafts=len(drafts))

    def _draft(self, slot: _Slot, end: int, num_wanted: int) -> list[int]:
        """Guesses for the positions from `end` on, as good as `draft_skill`; never more than wanted, by chance fewer."""
        history = [slot.token_ids[position] for position in range(end)]
        luck = _checksum(history, 77)
        drafts: list[int] = []
        for i in range(num_wanted if luck % 4 else luck // 4 % (num_wanted + 1)):
            token_id = self._next(slot, [*history, *drafts])
            drafts.append(token_id if luck // 32 // 8**i % 8 < self.draft_skill else (token_id + 1) % self.vocab_size)
        return drafts

    def _verify(self, slot: _Slot, history: Sequence[int], drafts: Sequence[int]) -> tuple[int, ...]:
        token_ids = [self._next(slot, history)]
        for draft in drafts:
            if draft != token_ids[-1]:
                break
            token_ids.append(self._next(slot, [*history, *token_ids]))
        return tuple(token_ids)

    def _next(self, slot: _Slot, history: Sequence[int]) -> int:
        new = slot.new
        return next_token(history, new.num_prompt_tokens, new.sampling, new.eos_token_ids, self.vocab_size)

    def _run_row(self, step: RequestStep, slot: _Slot, position: int) -> None:
        name, cell = step.request_id, self._cell(slot, position)
        assert position in slot.token_ids, f"{name}: the id at {position} is not known to anybody"
        entry = (position, slot.token_ids[position])
        if position < step.write_start:
            assert self._cells[cell] == entry, f"{name}: the adopted cell of position {position} holds {self._cells[cell]}"
        else:
            assert cell not in self._cells or position < slot.num_guessed, f"{name}: the cell of position {position} is written twice"
            self._cells[cell] = entry
        if step.num_drafts:
            slot.num_guessed = max(slot.num_guessed, position + 1)
        for ring, lowest in zip(slot.rings, (step.window_start, step.decoder_start)):
            if not self.window or position < lowest:
                continue
            ring[position % self.ring_rows] = entry
            for seen in range(max(lowest, position - self.window + 1), position + 1):
                held = ring.get(seen % self.ring_rows)
                assert held == (seen, slot.token_ids[seen]), f"{name}: the window of {position} finds {held} for position {seen}"

    def _restore(self, slot: _Slot) -> None:
        position, (encoder, decoder) = self._snapshots[slot.new.restore_block]
        assert position == slot.new.start, f"{slot.new.request_id}: starts at {slot.new.start}, restored to {position}"
        slot.rings = (dict(encoder), dict(decoder))

    def _score(self, step: RequestStep, slot: _Slot, end: int) -> tuple[TokenLogprobs, ...]:
        assert step.decoder_start == 0, f"{step.request_id}: prompt logprobs need every row"
        prompt = slot.new.token_ids[: slot.new.num_prompt_tokens]
        return tuple(prompt_score(prompt, position) for position in range(step.start + 1, min(end, len(prompt) - 1) + 1))

    def _cell(self, slot: _Slot, position: int) -> int:
        logical = position // self.block_tokens
        assert logical < len(slot.block_ids), f"{slot.new.request_id}: position {position} has no block"
        assert slot.block_ids[logical] != 0, "the null block was handed out"
        return slot.block_ids[logical] * self.block_tokens + position % self.block_tokens

    def _read(self, slot: _Slot, position: int, name: str) -> int:
        tag, token_id = self._cells[self._cell(slot, position)]
        assert tag == position, f"{name}: the cell of position {position} holds position {tag}"
        return token_id


class FakeStepHandle:
    def __init__(self, worker: FakeWorker, plan: StepPlan, owners: list[_Slot]) -> None:
        self.plan = plan
        self.owners = owners
        self._worker = worker

    def wait(self) -> StepResult:
        return self._worker._run(self)


def _checksum(token_ids: Sequence[int], seed: int) -> int:
    return zlib.crc32(array("I", token_ids).tobytes(), seed & 0xFFFFFFFF)
