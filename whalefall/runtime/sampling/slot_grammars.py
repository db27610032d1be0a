# SPDX-License-Identifier: Apache-2.0
"""The grammars of the requests in the worker's slots: which tokens the rows of a step may draw.

Masks are made on the host from tokens that are known. One step ahead, the token before a row was drawn by the step before and may still
lie on the device: then, and only for rows with a grammar, the host waits for that draw - while the forward of the row's own step, which
was launched first, already runs. So a grammar costs no plan, no other row and no forward; without grammars nothing is ever waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from whalefall.core.errors import RequestError
from whalefall.core.plan import NewRequest
from whalefall.runtime.sampling.grammar import Bits, Grammar, GrammarStore

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """What the rows of a step with a rule may draw."""

    row_M: IntArray
    """Rows of the step, ascending."""
    bits_MW: Bits
    must_end_M: npt.NDArray[np.bool_]
    """Only end-of-sequence may follow; the request's own min_tokens yields to that."""
    faults: dict[int, str]
    """Row -> why its mask is empty, where the grammar itself is at fault."""


class SlotGrammars:
    def __init__(self, store: GrammarStore | None, vocab_size: int) -> None:
        self._store = store
        self._num_words = -(-vocab_size // 32)
        self._slots: dict[int, _Place] = {}

    def set(self, request: NewRequest) -> None:
        """A request enters a slot, for the first time or again: its place is found anew from the tokens it has."""
        self._slots.pop(request.slot, None)
        spec = request.sampling.structured_outputs
        if spec is None:
            return
        place = self._slots[request.slot] = _Place(spec.after_token_id, len(request.token_ids))
        try:
            if self._store is None:
                raise RequestError("this engine was built without structured output")
            place.grammar = self._store.grammar_for(spec)
        except RequestError as error:  # it was checked at the door; whatever went wrong since then is this request's alone
            place.fault = error.message
        place.take(request.token_ids[request.num_prompt_tokens :])

    @property
    def is_empty(self) -> bool:
        return not self._slots

    @property
    def slots(self) -> Sequence[int]:
        """Whose request has a grammar."""
        return list(self._slots)

    def masks(
        self, slot_L: IntArray, position_L: IntArray, drafts_by_slot: Mapping[int, Sequence[int]] | None = None
    ) -> GrammarMasks | None:
        """Of the rows that draw for these slots, at these positions; None when no row has a rule now.

        Args:
            drafts_by_slot: the drafts in front of the second and later rows of a slot, whose rows stand together.
        """
        if not self._slots:
            return None
        rows: list[int] = []
        places: list[_Place] = []
        trial, last_slot, place_in_block = None, -1, 0
        for row, (slot, position) in enumerate(zip(slot_L.tolist(), position_L.tolist())):
            place = self._slots.get(slot)
            if place is None:
                continue
            if slot != last_slot:
                place.catch_up(position)
                trial, last_slot, place_in_block = place, slot, 0
            elif trial is not None:
                assert drafts_by_slot is not None
                trial = trial.tried(drafts_by_slot[slot][place_in_block])
                place_in_block += 1
            if trial is not None and not trial.is_waiting:
                rows.append(row)
                places.append(trial)
        return self._fill(rows, places) if rows else None

    def note(self, slot_R: IntArray, ids_L: Tensor, first_R: IntArray | None = None, num_R: Tensor | None = None) -> None:
        """These ids were drawn, `num_R` of them (one) from row `first_R` (its index) on for each slot. The host copy starts now, behind the
        draw and before the next forward."""
        if not self._slots:
            return
        concerned = [(r, self._slots[slot]) for r, slot in enumerate(slot_R.tolist()) if slot in self._slots]
        if concerned:
            drawn, counts = _HostCopy(ids_L), None if num_R is None else _HostCopy(num_R)
            for r, place in concerned:
                place.drawn = drawn, counts, r, r if first_R is None else int(first_R[r])

    def _fill(self, rows: list[int], places: list[_Place]) -> GrammarMasks:
        bits_MW = np.zeros((len(rows), self._num_words), np.int32)
        sound = [i for i, place in enumerate(places) if place.fault is None]
        grammars: list[Grammar] = [g for i in sound if (g := places[i].grammar) is not None]
        if grammars:
            assert self._store is not None
            filled = np.zeros((len(grammars), self._num_words), np.int32)
            self._store.fill_masks(grammars, filled)
            bits_MW[sound] = filled
        for place in places:
            if place.fault is None and place.grammar is not None:
                place.fault = place.grammar.fault
        return GrammarMasks(
            row_M=np.array(rows, np.int64),
            bits_MW=bits_MW,
            must_end_M=np.array([p.fault is None and p.grammar is not None and p.grammar.is_finished for p in places], np.bool_),
            faults={row: place.fault for row, place in zip(rows, places) if place.fault is not None},
        )


class _Place:
    """One request's way through its grammar."""

    def __init__(self, after_token_id: int | None, num_known: int) -> None:
        self.grammar: Grammar | None = None
        self.fault: str | None = None
        self.is_waiting = after_token_id is not None
        """The reasoning has not ended: no rule yet."""
        self.drawn: tuple[_HostCopy, _HostCopy | None, int, int] | None = None
        """Where the latest tokens are, until they are needed: ids, counts, index of the count, first row of the ids."""
        self._after_token_id = after_token_id
        self._num_known = num_known

    def catch_up(self, position: int) -> None:
        """Take the tokens in front of `position`, if that is still to be done."""
        if self._num_known < position:
            assert self.drawn is not None, "tokens that nobody drew"
            ids, counts, request, first = self.drawn
            drawn = ids.ids()[first : first + (1 if counts is None else counts.ids()[request])]
            assert self._num_known + len(drawn) == position, "the tokens of a step are taken before the next step's"
            self.take(drawn)
            self._num_known = position

    def tried(self, draft_id: int) -> _Place | None:
        """A copy that has taken a draft; None when the draft is not allowed, or nothing is any more."""
        if self.fault is not None:
            return None
        copy = _Place(self._after_token_id, self._num_known)
        copy.is_waiting = self.is_waiting
        copy.grammar = None if self.grammar is None else self.grammar.clone()
        copy.take((draft_id,))
        return copy if copy.fault is None else None

    def take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self.is_waiting:
                self.is_waiting = token_id != self._after_token_id
            elif self.grammar is not None and self.fault is None and not self.grammar.is_finished:
                # A finished grammar has allowed the end alone; with ignore_eos the request goes on to repeat it.
                self.grammar.advance(token_id)
                self.fault = self.grammar.fault


class _HostCopy:
    """Ids on their way to the host."""

    def __init__(self, ids_L: Tensor) -> None:
        self._ready = None
        self._ids: list[int] | None = None
        if ids_L.device.type == "cuda":
            self._host_L = torch.empty(ids_L.shape, dtype=ids_L.dtype, pin_memory=True).copy_(ids_L, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()
        else:
            self._host_L = ids_L

    def ids(self) -> list[int]:
        if self._ids is None:
            if self._ready is not None:
                self._ready.synchronize()
            self._ids = self._host_L.tolist()
        return self._ids
