# SPDX-License-Identifier: Apache-2.0
"""Grammars under speculation: every row has the mask that holds behind its drafts, and a rule begins wherever in a block reasoning ends."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from tests.runtime.sampling.test_grammar import EOS, STORE, TOKENIZER, VOCAB, Rule, encode
from tests.runtime.spec.drafters import FakeDrafter
from tests.runtime.worker.driver import BLOCK_TOKENS, Answer, Engine
from whalefall.core.batch import CacheTensors, ForwardBatch
from whalefall.core.cache_spec import CacheSpec
from whalefall.core.request import FinishReason
from whalefall.core.structure import StructuredSpec
from whalefall.models.toy.config import ToyConfig
from whalefall.testing.toy_checkpoint import toy_model

THINK_END = TOKENIZER.token_to_id("</think>")
SCHEMA = {"type": "object", "properties": {"result": {"type": "string"}}, "required": ["result"], "additionalProperties": False}
SCRIPT = [*encode("a"), THINK_END, *encode('{"n":1}'), EOS[0]]
PROMPT = [5, 6, 7]


class ScriptModel:
    """Wants to say the script, whatever came before; in the script it insists on a second brace where a grammar must forbid it."""

    def forward(self, batch: ForwardBatch, cache: CacheTensors) -> Tensor:
        rows_L = batch.logit_rows_L
        place_L = (batch.decoder.positions_T[rows_L] + 1 - len(PROMPT)).clamp(0, len(SCRIPT) - 1)
        logits_LV = torch.zeros(len(rows_L), VOCAB)
        logits_LV.scatter_(1, torch.tensor(SCRIPT)[place_L][:, None], 20.0)
        logits_LV[:, encode("{")[0]] += 12  # a model that would open twice, or inside its reasoning
        logits_LV[:, THINK_END] += 11
        return logits_LV


def script_answer(k: int, *, num_requests: int = 1, one_step_ahead: bool = False, kind: str = "json_object") -> list[Answer]:
    drafter = FakeDrafter(VOCAB, oracle=lambda h: (SCRIPT + [0] * 9)[max(0, len(h) - len(PROMPT))], skill=0.9, shortest=9)
    engine = Engine(
        model=ScriptModel(),
        spec=CacheSpec(block_tokens=BLOCK_TOKENS),
        vocab_size=VOCAB,
        drafter=drafter,
        num_drafts=k,
        grammars=STORE,
        one_step_ahead=one_step_ahead,
        num_slots=40,
    )
    rule = Rule(json_object=True) if kind == "json_object" else Rule(json={"type": "object", "required": ["n"]})
    spec = StructuredSpec(kind=rule.kind, text=rule.text, after_token_id=THINK_END)

    def on_turn(turn: int) -> None:
        for i in range(num_requests):
            if i % 5 == turn:
                engine.add(f"r{i}", PROMPT, structured_outputs=spec, ignore_eos=False, max_tokens=20, logprobs=0)

    engine.add("first", PROMPT, structured_outputs=spec, ignore_eos=False, max_tokens=20, logprobs=0)
    return list(engine.run(on_turn).values())


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
@pytest.mark.parametrize("k", range(1, 9))
def test_reasoning_that_ends_inside_a_block(k: int, kind: str) -> None:
    (answer, *_) = script_answer(k, kind=kind)
    assert answer.token_ids == SCRIPT and answer.finish_reason is FinishReason.STOP and answer.error is None
    assert len(answer.logprobs) == len(SCRIPT)


@pytest.mark.parametrize("one_step_ahead", [False, True])
@pytest.mark.parametrize("num_requests", [8, 32])
def test_many_at_different_places_of_their_answers(num_requests: int, one_step_ahead: bool) -> None:
    for answer in script_answer(3, num_requests=num_requests, one_step_ahead=one_step_ahead):
        assert answer.token_ids == SCRIPT and answer.error is None


@pytest.mark.parametrize("one_step_ahead", [False, True])
def test_random_drafts_never_break_a_grammar(one_step_ahead: bool) -> None:
    """Each answer that ends parses and fits its schema, none ends with a grammar's fault, and drafts change no token."""
    config = ToyConfig(vocab_size=VOCAB)
    engines = [
        Engine(
            model=toy_model(config),
            vocab_size=VOCAB,
            grammars=STORE,
            drafter=FakeDrafter(VOCAB, oracle=json_like, skill=0.7) if k else None,
            num_drafts=k,
            one_step_ahead=one_step_ahead,
            num_slots=20,
        )
        for k in (0, 3)
    ]
    for engine in engines:
        for seed in range(20):
            engine.add(f"{seed}", [3 + seed, 9], temperature=1.0, seed=seed, structured_outputs=Rule(json=SCHEMA), ignore_eos=False,
                       max_tokens=60, logit_bias={encode('"')[0]: 4.0})  # fmt: skip
    plain, drafted = (engine.run() for engine in engines)

    assert engines[1].num_accepted > 50
    num_stopped = 0
    for name, answer in drafted.items():
        assert answer.error is None and answer.token_ids == plain[name].token_ids
        if answer.finish_reason is FinishReason.STOP:
            num_stopped += 1
            assert set(json.loads(TOKENIZER.decode(answer.token_ids[:-1], skip_special_tokens=False))) == {"result"}
    assert num_stopped > 5


def json_like(history: list[int]) -> int:
    """A drafter that knows how the answer begins."""
    begin = encode('{"result":"')
    place = len(history) - 2
    return begin[place] if place < len(begin) else encode('"')[0]
