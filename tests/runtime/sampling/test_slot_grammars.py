# SPDX-License-Identifier: Apache-2.0
"""Masks for the rows of a step: the right place in each request's grammar, whatever the grouping of tokens, reasoning or preemption."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.runtime.sampling.test_grammar import EOS, STORE, TOKENIZER, VOCAB, Rule, encode
from whalefall.core.plan import NewRequest
from whalefall.core.sampling import SamplingParams
from whalefall.core.structure import StructuredSpec
from whalefall.runtime.sampling.params import SlotParams
from whalefall.runtime.sampling.sampler import Fault, Sampled, sample
from whalefall.runtime.sampling.slot_grammars import GrammarMasks, SlotGrammars

PROMPT = (5, 6, 7)
THINK_END = TOKENIZER.token_to_id("</think>")
NOT_IN_JSON = encode("~")[0]


def request(spec: StructuredSpec | None, *output: int, slot: int = 0, after: int | None = None, **sampling: object) -> NewRequest:
    if spec is not None and after is not None:
        spec = StructuredSpec(kind=spec.kind, text=spec.text, after_token_id=after)
    params = SamplingParams(**{"seed": slot, "max_tokens": 64, "structured_outputs": spec, **sampling})  # type: ignore[arg-type]
    return NewRequest(
        request_id=str(slot), slot=slot, token_ids=(*PROMPT, *output), num_prompt_tokens=len(PROMPT), sampling=params, eos_token_ids=EOS
    )


def masks_at(slots: SlotGrammars, positions: dict[int, int]) -> GrammarMasks | None:
    return slots.masks(np.array(list(positions), np.int64), np.array(list(positions.values()), np.int64))


def ids_of(masks: GrammarMasks | None, row: int = 0) -> set[int] | None:
    if masks is None or row not in masks.row_M.tolist():
        return None
    bits = masks.bits_MW[masks.row_M.tolist().index(row)]
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def draw(logits_LV: torch.Tensor, requests: list[NewRequest], slots: SlotGrammars | None = None) -> Sampled:
    params, slots = SlotParams(len(requests), VOCAB), slots or SlotGrammars(STORE, VOCAB)
    table = torch.zeros((len(requests), 100), dtype=torch.int32)
    for one in requests:
        params.set(one)
        slots.set(one)
        table[one.slot, : len(one.token_ids)] = torch.tensor(one.token_ids)
    slot_L = np.array([one.slot for one in requests], np.int64)
    position_L = np.array([len(one.token_ids) for one in requests], np.int64)
    return sample(logits_LV, params.rows(slot_L, position_L).with_grammar(slots.masks(slot_L, position_L)), table)


PIECES = [[THINK_END], encode("{"), encode('"n"'), encode(":"), encode("1"), encode("}"), [EOS[0]]]
"""The answer of a model that thinks first, in the pieces of a speculative step."""


@pytest.mark.parametrize("k", range(1, 9))
def test_any_grouping_of_tokens_leads_to_the_same_place(k: int) -> None:
    """Reasoning, its end and the first brace may come in one step: the rule begins behind the end, no token earlier and none later."""
    pieces = [encode("a~"), *PIECES]
    whole = [token for piece in pieces for token in piece]
    for count in range(0, len(whole), k):
        slots = SlotGrammars(STORE, VOCAB)
        slots.set(request(Rule(json_object=True), *whole[:count], after=THINK_END))
        got = ids_of(masks_at(slots, {0: len(PROMPT) + count}))
        if count < 3:
            assert got is None, "no mask before the reasoning has ended"
        elif count == 3:
            assert got == {encode("{")[0]}
        else:
            assert got is not None and whole[count] in got and THINK_END not in got


def test_empty_reasoning_ends_at_its_first_token() -> None:
    slots = SlotGrammars(STORE, VOCAB)
    slots.set(request(Rule(json_object=True), THINK_END, after=THINK_END))
    assert ids_of(masks_at(slots, {0: len(PROMPT) + 1})) == {encode("{")[0]}
    slots.set(request(Rule(json_object=True), after=THINK_END))
    assert masks_at(slots, {0: len(PROMPT)}) is None


def test_drawn_tokens_are_taken_one_step_later() -> None:
    """As in the loop that runs one step ahead: `note` leaves the ids where they are, the next `masks` needs them."""
    slots = SlotGrammars(STORE, VOCAB)
    slots.set(request(Rule(regex="ab*c"), slot=0))
    slots.set(request(None, slot=1))
    slots.set(request(Rule(choice=["ax", "ay"]), slot=2))
    a, b, c = encode("abc")
    order = np.array([2, 1, 0], np.int64)
    masks = slots.masks(order, np.full(3, len(PROMPT), np.int64))
    assert ids_of(masks, 0) == {a} and ids_of(masks, 1) is None and ids_of(masks, 2) == {a}
    slots.note(order, torch.tensor([a, 9, a]))
    masks = slots.masks(np.array([0, 2], np.int64), np.full(2, len(PROMPT) + 1, np.int64))
    assert ids_of(masks, 0) == {b, c} and ids_of(masks, 1) == set(encode("xy"))


def test_a_slot_taken_over_forgets_the_one_before() -> None:
    slots = SlotGrammars(STORE, VOCAB)
    slots.set(request(Rule(regex="ab")))
    slots.set(request(None))
    assert masks_at(slots, {0: len(PROMPT)}) is None
    slots.set(request(Rule(regex="xy"), *encode("x")))  # back after a preemption: its place is that of its tokens
    assert ids_of(masks_at(slots, {0: len(PROMPT) + 1})) == set(encode("y"))


def test_only_rows_with_a_rule_are_masked_and_nothing_lifts_a_mask() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, NOT_IN_JSON] = 50.0
    brace = encode("{")[0]
    sampled = draw(
        logits,
        [
            request(Rule(json_object=True), slot=0),
            request(None, slot=1),
            request(Rule(json_object=True), slot=2, logit_bias={NOT_IN_JSON: 100.0}, repetition_penalty=0.5, presence_penalty=-2.0),
            request(Rule(json_object=True), slot=3, temperature=0.0, top_k=1),
        ],
    )
    assert sampled.ids_L.tolist() == [brace, NOT_IN_JSON, brace, brace] and not sampled.fault_L.any()


def test_an_answer_that_must_end_ends_in_spite_of_min_tokens() -> None:
    whole = encode("{}")
    sampled = draw(torch.zeros(1, VOCAB), [request(Rule(regex="[{][}]"), *whole, min_tokens=20)])
    assert sampled.ids_L.tolist() == [EOS[0]] and not sampled.fault_L.any()
    # Where it may go on it does.
    free = [draw(torch.zeros(1, VOCAB), [request(Rule(regex="[{]+"), *encode("{{"), min_tokens=20, seed=s)]) for s in range(8)]
    assert {one.ids_L.item() for one in free} == {encode("{")[0]}


def test_after_the_end_only_the_end_may_follow() -> None:
    """ignore_eos: a finished answer is followed by nothing but end-of-sequence."""
    slots = SlotGrammars(STORE, VOCAB)
    slots.set(request(Rule(choice=["a"]), *encode("a"), EOS[0], EOS[0], ignore_eos=True))
    assert ids_of(masks_at(slots, {0: len(PROMPT) + 3})) == {EOS[0]}


def test_a_dead_end_is_that_rows_fault_alone() -> None:
    brace = encode("{")[0]
    slots = SlotGrammars(STORE, VOCAB)
    requests = [request(Rule(json_object=True), slot=0, logit_bias={brace: -100.0}), request(Rule(json_object=True), slot=1)]
    sampled = draw(torch.zeros(2, VOCAB), requests, slots)
    assert sampled.fault_L.tolist() == [Fault.ALL_FORBIDDEN, Fault.NONE] and sampled.ids_L[1] == brace
    slots.set(request(Rule(json_object=True), *encode("x")))  # a token the grammar does not know
    masks = masks_at(slots, {0: len(PROMPT) + 1})
    assert ids_of(masks) == set() and masks is not None and "doesn't satisfy" in masks.faults[0]


def test_without_a_compiler_a_structured_request_ends_with_a_reason() -> None:
    slots = SlotGrammars(None, VOCAB)
    slots.set(request(Rule(json_object=True)))
    masks = masks_at(slots, {0: len(PROMPT)})
    assert masks is not None and masks.faults == {0: "this engine was built without structured output"}
