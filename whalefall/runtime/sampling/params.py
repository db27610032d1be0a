# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of the requests in the worker's slots, as columns: a step reads its rows with one indexing per column.

Host memory only. The columns decide which work a step needs at all, so no decision waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from whalefall.core.plan import NewRequest
from whalefall.kernels.sampling import NO_LIMIT
from whalefall.runtime.sampling.slot_grammars import GrammarMasks

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

NOT_WANTED = -2
"""Value of a logprobs column for a request that asked for none."""
WHOLE_VOCABULARY = -1
MIN_TEMPERATURE = 1e-6
"""Lower temperatures act as this one: a difference of one in the logits already decides, and the division stays finite."""
FORBIDDEN_BIAS = -100.0
"""This logit bias forbids an id altogether; any higher one is added."""


@dataclass(frozen=True, slots=True)
class RowParams:
    """What the sampler needs to know of the L rows of a step that draw a token; host arrays of length L."""

    slot_L: IntArray
    position_L: IntArray
    """Absolute position that the drawn token will have."""
    num_prompt_L: IntArray
    temperature_L: FloatArray
    """0 is greedy."""
    top_k_L: IntArray
    top_p_L: FloatArray
    min_p_L: FloatArray
    seed_L: IntArray
    presence_L: FloatArray
    frequency_L: FloatArray
    repetition_L: FloatArray
    num_logprobs_L: IntArray
    """NOT_WANTED, WHOLE_VOCABULARY, or how many alternatives."""
    is_plain_L: BoolArray
    """Greedy and untouched: the argmax of the raw logits is the answer."""
    has_penalties_L: BoolArray
    biases: tuple[tuple[int, IntArray, FloatArray], ...]
    """(row, ids, values to add)."""
    bans: tuple[tuple[int, IntArray], ...]
    """(row, ids that may not be drawn now)."""
    grammar: GrammarMasks | None = None
    """What the rows with a grammar may draw."""

    def with_grammar(self, masks: GrammarMasks | None) -> RowParams:
        """These rows under their grammars. Where only the end may follow, min_tokens no longer forbids it."""
        if masks is None:
            return self
        is_plain_L = self.is_plain_L.copy()
        is_plain_L[masks.row_M] = False
        ending = set(masks.row_M[masks.must_end_M].tolist())
        return replace(self, is_plain_L=is_plain_L, grammar=masks, bans=tuple(ban for ban in self.bans if ban[0] not in ending))


class SlotParams:
    """One row per slot; `set` when a request enters a slot."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.num_prompt_logprobs = np.full(num_slots, NOT_WANTED, np.int64)
        self.use_drafts = np.zeros(num_slots, np.bool_)
        self._min_tokens = np.zeros(num_slots, np.int64)
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.full(num_slots, NO_LIMIT, np.int64)
        self._top_p = np.ones(num_slots, np.float32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._seed = np.zeros(num_slots, np.int64)
        self._presence = np.zeros(num_slots, np.float32)
        self._frequency = np.zeros(num_slots, np.float32)
        self._repetition = np.ones(num_slots, np.float32)
        self._num_logprobs = np.full(num_slots, NOT_WANTED, np.int64)
        self._has_penalties = np.zeros(num_slots, np.bool_)
        self._bias: dict[int, tuple[IntArray, FloatArray]] = {}
        self._end_ids: dict[int, IntArray] = {}

    def set(self, request: NewRequest) -> None:
        """Overwrite the request's slot."""
        p, slot = request.sampling, request.slot
        assert p.seed is not None or p.is_greedy, f"{request.request_id}: the seed is resolved before a request reaches the worker"
        self.num_prompt[slot] = request.num_prompt_tokens
        self.num_prompt_logprobs[slot] = NOT_WANTED if p.prompt_logprobs is None else p.prompt_logprobs
        self.use_drafts[slot] = p.use_drafts
        self._min_tokens[slot] = p.min_tokens
        self._temperature[slot] = 0.0 if p.is_greedy else max(p.temperature, MIN_TEMPERATURE)
        self._top_k[slot] = p.top_k if p.top_k > 0 else NO_LIMIT
        self._top_p[slot] = p.top_p
        self._min_p[slot] = p.min_p
        self._seed[slot] = np.uint64((p.seed or 0) % 2**64).astype(np.int64)
        self._presence[slot] = p.presence_penalty
        self._frequency[slot] = p.frequency_penalty
        self._repetition[slot] = p.repetition_penalty
        self._num_logprobs[slot] = NOT_WANTED if p.logprobs is None else p.logprobs
        self._has_penalties[slot] = p.has_penalties
        self._set_ids(request)

    def rows(self, slot_L: IntArray, position_L: IntArray) -> RowParams:
        """The parameters of the rows that draw for these slots, at these positions."""
        temperature_L = self._temperature[slot_L]
        has_penalties_L = self._has_penalties[slot_L]
        biases = [(row, *self._bias[slot]) for row, slot in enumerate(slot_L.tolist()) if slot in self._bias] if self._bias else []
        too_short_L = position_L - self.num_prompt[slot_L] < self._min_tokens[slot_L]
        bans = [(row, self._end_ids[int(slot_L[row])]) for row in np.flatnonzero(too_short_L).tolist()]
        is_plain_L = (temperature_L == 0) & ~has_penalties_L & ~too_short_L
        is_plain_L[[row for row, *_ in biases]] = False
        return RowParams(
            slot_L=slot_L,
            position_L=position_L,
            num_prompt_L=self.num_prompt[slot_L],
            temperature_L=temperature_L,
            top_k_L=self._top_k[slot_L],
            top_p_L=self._top_p[slot_L],
            min_p_L=self._min_p[slot_L],
            seed_L=self._seed[slot_L],
            presence_L=self._presence[slot_L],
            frequency_L=self._frequency[slot_L],
            repetition_L=self._repetition[slot_L],
            num_logprobs_L=self._num_logprobs[slot_L],
            is_plain_L=is_plain_L,
            has_penalties_L=has_penalties_L,
            biases=tuple(biases),
            bans=tuple(bans),
        )

    def _set_ids(self, request: NewRequest) -> None:
        """Ids outside the vocabulary are refused at the door; one that slips through must not take down the whole step."""
        p, slot = request.sampling, request.slot
        self._bias.pop(slot, None)
        known = {i: b for i, b in p.logit_bias.items() if i < self._vocab_size}
        if known:
            values = np.fromiter(known.values(), np.float32, len(known))
            values[values <= FORBIDDEN_BIAS] = -np.inf
            self._bias[slot] = np.fromiter(known, np.int64, len(known)), values
        ends = {*p.stop_token_ids, *(() if p.ignore_eos else request.eos_token_ids)}
        self._end_ids[slot] = np.array(sorted(i for i in ends if i < self._vocab_size), np.int64)
