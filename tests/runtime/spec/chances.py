# SPDX-License-Identifier: Apache-2.0
"""Many short answers at once through the real rounds, with a target and a drafter that are tables; and what their chances should be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.runtime.sampling import by_the_book
from whalefall.core.batch import CacheTensors, DraftRequests, Drafts
from whalefall.core.plan import NewRequest, RequestStep
from whalefall.core.sampling import SamplingParams
from whalefall.runtime.sampling.params import SlotParams
from whalefall.runtime.sampling.slot_grammars import GrammarMasks
from whalefall.runtime.spec.rounds import Rounds, SpecConfig
from whalefall.runtime.spec.verify import Acceptance, Blocks

VOCAB, LENGTH, PROMPT = 5, 3, (0, 3)
TARGET_VV = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.2
"""Logits of the next token, by the latest one."""
DRAFT_VV = TARGET_VV + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)) * 0.8

Rule = Callable[[int], set[int]]
"""What may follow a token."""


class TableDrafter:
    max_draft_tokens = 8

    def __init__(self, *, lies: bool = False) -> None:
        self._lies = lies

    def draft(self, requests: DraftRequests, cache: CacheTensors, k: int) -> Drafts:
        latest_R, ids, probs = requests.latest_id_R, [], []
        for i in range(k):
            latest_R, probs_RV = requests.choose(DRAFT_VV[latest_R], i)
            ids.append(latest_R)
            probs.append(torch.full_like(DRAFT_VV[latest_R], 1 / VOCAB) if self._lies else probs_RV)
        has_probs = all(p is not None for p in probs)
        return Drafts(ids_RK=torch.stack(ids, 1), probs_RKV=torch.stack(probs, 1) if has_probs else None)  # type: ignore[arg-type]


def answers(
    acceptance: Acceptance, num_answers: int, *, k: int = 2, rule: Rule | None = None, lies: bool = False, **sampling: Any
) -> tuple[np.ndarray[Any, Any], float]:
    """LENGTH tokens of each answer, int64 [num_answers, LENGTH], and how many drafts were accepted, of those that were judged."""
    params = SlotParams(num_answers, VOCAB)
    table = torch.zeros((num_answers, len(PROMPT) + LENGTH + k + 2), dtype=torch.int32)
    table[:, : len(PROMPT)] = torch.tensor(PROMPT)
    for slot in range(num_answers):
        params.set(_request(slot, seed=slot, **sampling))
    rounds = Rounds(TableDrafter(lies=lies), SpecConfig(num_drafts=k, acceptance=acceptance), params, table)
    known, drafts_now = np.full(num_answers, len(PROMPT)), 0
    num_judged = num_accepted = 0
    while (active := np.flatnonzero(known < len(PROMPT) + LENGTH)).size:
        steps = rounds.settle([_step(int(slot), int(known[slot]) - 1, drafts_now) for slot in active])
        rounds.place(steps)
        blocks = Blocks(active, np.array([step.num_tokens for step in steps]))
        slot_L = np.repeat(active, blocks.num_rows_R)
        place_L = np.arange(len(slot_L)) - np.repeat(blocks.first_R, blocks.num_rows_R)
        position_L = known[slot_L] + place_L
        latest_L = table[torch.from_numpy(slot_L), torch.from_numpy(position_L - 1)].long()
        masks = None if rule is None else _masks(rule, latest_L)
        rows = params.rows(slot_L, position_L).with_grammar(masks)
        judged = rounds.judge(TARGET_VV[latest_L], rows, blocks)
        assert not judged.fault_R.any()
        table[torch.from_numpy(slot_L), torch.from_numpy(position_L)] = judged.ids_L.int()
        rounds.draft(rows, blocks, judged, None)  # type: ignore[arg-type]
        known[active] += judged.num_new_R.numpy()
        num_judged += int((blocks.num_rows_R - 1).sum())
        num_accepted += int(judged.num_new_R.sum()) - len(active)
        drafts_now = k
    return table[:, len(PROMPT) : len(PROMPT) + LENGTH].long().numpy(), num_accepted / num_judged


def chances(*, rule: Rule | None = None, **sampling: Any) -> np.ndarray[Any, Any]:
    """float64 [VOCAB] * LENGTH: of each whole answer, by the book."""
    request = _request(0, seed=0, **sampling)
    out = np.zeros((VOCAB,) * LENGTH)
    for answer in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for i, token_id in enumerate(answer):
            history = [*PROMPT, *answer[:i]]
            logits = TARGET_VV[history[-1]].tolist()
            if rule is not None:
                logits = [x if v in rule(history[-1]) else -math.inf for v, x in enumerate(logits)]
            shaped = by_the_book.shaped(logits, request.sampling, PROMPT, answer[:i], request.eos_token_ids)
            kept = by_the_book.support(shaped, request.sampling)
            weights = {v: math.exp(shaped[v] / request.sampling.temperature) for v in kept}
            chance *= weights.get(token_id, 0.0) / sum(weights.values())
        out[answer] = chance
    return out


def chi_square(drawn: np.ndarray[Any, Any], chance: np.ndarray[Any, Any]) -> float:
    """How far counts are from what they should be, in standard deviations of the statistic: about 0, and above 4 once in thousands."""
    counts = np.bincount(np.ravel_multi_index(tuple(drawn.T), chance.shape), minlength=chance.size)
    expected = chance.ravel() * len(drawn)
    assert not counts[expected == 0].any(), "an answer that cannot be"
    is_rare = expected < 8
    seen, wanted = (np.append(x[~is_rare], x[is_rare].sum()) for x in (counts, expected))
    statistic = float((((seen - wanted) ** 2) / np.maximum(wanted, 1e-9)).sum())
    freedom = len(seen) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def _request(slot: int, *, seed: int, **sampling: Any) -> NewRequest:
    params = SamplingParams(seed=seed, **{"max_tokens": 50, **sampling})
    return NewRequest(request_id=str(slot), slot=slot, token_ids=PROMPT, num_prompt_tokens=len(PROMPT), sampling=params, eos_token_ids=(1,))


def _step(slot: int, start: int, num_drafts: int) -> RequestStep:
    return RequestStep(str(slot), slot, start, 1 + num_drafts, (), 0, 0, True, False, num_drafts=num_drafts)


def _masks(rule: Rule, latest_L: Tensor) -> GrammarMasks:
    bits_V = np.array([[sum(1 << v for v in rule(latest))] for latest in range(VOCAB)], np.int32)
    count = len(latest_L)
    return GrammarMasks(row_M=np.arange(count), bits_MW=bits_V[latest_L.numpy()], must_end_M=np.zeros(count, np.bool_), faults={})
