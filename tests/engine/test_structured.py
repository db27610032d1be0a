# SPDX-License-Identifier: Apache-2.0
"""Structured answers from a model with random weights: whatever it would like to say, the rule holds; and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest

from whalefall import LLM, AsyncLLM, EngineConfig, SamplingParams
from whalefall import StructuredOutputsParams as Rule
from whalefall.core.errors import RequestError
from whalefall.core.request import AbortRequests, EngineRequest, FinishReason
from whalefall.core.structure import StructuredSpec
from whalefall.engine.messages import Submit, decode_to_engine, encode
from whalefall.runtime.sampling.grammar import Grammar, GrammarFault

PERSON = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 999}, "kind": {"enum": ["whale", "fall"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
TEXT = {"type": "object", "properties": {"result": {"type": "string"}}, "required": ["result"], "additionalProperties": False}
WAYS = [
    {},
    {"async_scheduling": True},
    {"max_num_batched_tokens": 7, "async_scheduling": True},
    {"kv_cache_memory_bytes": 20 * 8 * 512, "max_model_len": 64},
    {"kv_cache_memory_bytes": 20 * 8 * 512, "max_model_len": 64, "async_scheduling": True},
]


def params(rule: StructuredSpec | None, **more: Any) -> SamplingParams:
    return SamplingParams(**{"structured_outputs": rule, "max_tokens": 48, "seed": 5, **more})


RULES = [
    params(Rule(json=PERSON)),
    params(Rule(regex="[a-f]{4,20}[.]"), logprobs=3),
    params(None, ignore_eos=True, max_tokens=30),
    params(Rule(choice=["red", "green", "greenish"]), temperature=0.0),
    params(Rule(json=PERSON), n=3, temperature=1.5),
    params(Rule(grammar='root ::= "yes" | "no" root'), presence_penalty=1.0),
    params(Rule(json_object=True), min_tokens=10),
    params(None, temperature=0.0, ignore_eos=True, max_tokens=30),
]


def check(sampling: SamplingParams, text: str) -> None:
    spec = sampling.structured_outputs
    if spec is None:
        return
    if spec.kind == "json_schema":
        value = json.loads(text)
        assert set(value) == {"n", "kind"} and 0 <= value["n"] <= 999 and value["kind"] in ("whale", "fall")
    elif spec.kind == "json_object":
        assert isinstance(json.loads(text), dict)
    elif spec.kind == "choice":
        assert text in json.loads(spec.text)
    else:
        assert re.fullmatch("(no)*yes" if spec.kind == "grammar" else spec.text, text)


def answers(llm: LLM, sampling: Sequence[SamplingParams]) -> list[list[tuple[list[int], str, Any]]]:
    outputs = llm.generate([f"whale {i}" for i in range(len(sampling))], sampling, use_tqdm=False)
    return [[(c.token_ids, c.text, c.finish_reason) for c in output.outputs] for output in outputs]


@pytest.mark.parametrize("options", WAYS, ids=lambda options: ",".join(options) or "plain")
def test_every_answer_keeps_its_rule_alone_and_in_a_crowd(make_llm: Callable[..., LLM], options: dict[str, Any]) -> None:
    """One step ahead or not, in chunks, preempted and rebuilt from its tokens: the same tokens, and every one of them allowed."""
    llm = make_llm(**options)
    crowd = answers(llm, RULES)
    ended = 0
    for sampling, choices in zip(RULES, crowd, strict=True):
        assert len(choices) == sampling.n
        for _, text, reason in choices:
            assert reason in ("stop", "length")
            if reason == "stop":
                check(sampling, text)
                ended += sampling.structured_outputs is not None
    assert ended >= 5
    assert crowd == answers(make_llm(), RULES)
    for place in (0, 4):
        (output,) = llm.generate(f"whale {place}", RULES[place], use_tqdm=False)
        assert [c.token_ids for c in output.outputs] == [ids for ids, *_ in crowd[place]]


def test_a_pool_too_small_did_preempt_structured_requests(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**WAYS[3])
    before = llm.core.scheduler.num_preemptions
    answers(llm, [params(Rule(regex="[a-z]{45}"), seed=s) for s in range(8)])
    assert llm.core.scheduler.num_preemptions > before


def test_fifty_seeds_give_valid_json_or_run_out_of_room(llm: LLM) -> None:
    outputs = llm.generate(["x"] * 50, [params(Rule(json=TEXT), seed=s, max_tokens=80) for s in range(50)], use_tqdm=False)
    reasons = [o.outputs[0].finish_reason for o in outputs]
    assert set(reasons) <= {"stop", "length"} and reasons.count("stop") >= 3
    for output in outputs:
        if output.outputs[0].finish_reason == "stop":
            value = json.loads(output.outputs[0].text)
            assert list(value) == ["result"] and isinstance(value["result"], str)


def test_logprobs_under_a_grammar_are_the_models_own_and_finite(llm: LLM) -> None:
    sampling = params(Rule(regex="[a-f]{12}"), logprobs=5)
    choice = llm.generate("x", sampling, use_tqdm=False)[0].outputs[0]
    assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
    free = {p: {i: e.logprob for i, e in position.items()} for p, position in enumerate(choice.logprobs)}
    for position in free.values():
        assert all(np.isfinite(value) for value in position.values())
        assert sum(np.exp(value) for value in position.values()) <= 1 + 1e-5


def test_the_rule_begins_behind_the_reasoning(llm: LLM) -> None:
    end = llm.get_tokenizer().token_to_id("</think>")
    assert end is not None
    spec = StructuredSpec(kind="regex", text="[a-c]{5}", after_token_id=end)
    # The bias lets the reasoning end soon; before that anything goes, behind it only the pattern.
    outputs = llm.generate(["x"] * 20, [params(spec, seed=s, logit_bias={end: 4.0}, max_tokens=60) for s in range(20)], use_tqdm=False)
    free = 0
    for output in outputs:
        ids = output.outputs[0].token_ids
        if end in ids and output.outputs[0].finish_reason == "stop":
            place = ids.index(end)
            free += place > 0
            assert re.fullmatch("[a-c]{5}", llm.get_tokenizer().decode(ids[place + 1 : -1], skip_special_tokens=True))
    assert free >= 3


def test_bad_rules_start_nothing(llm: LLM) -> None:
    for bad in (Rule(regex="("), Rule(json={"not": {}}), Rule(grammar="@@")):
        with pytest.raises(RequestError, match=f"structured_outputs[.]{bad.param.split('.')[1]}"):
            llm.generate(["fine", "bad"], [params(None), params(bad)], use_tqdm=False)
    with pytest.raises(RequestError, match="structured_outputs must come from"):
        SamplingParams(structured_outputs={"json": {}})  # type: ignore[arg-type]


def test_a_dead_end_ends_that_request_only(llm: LLM) -> None:
    brace = llm.get_tokenizer().encode("{", add_bos=False, allow_special=False)[0]
    good = [params(Rule(json=PERSON)), params(None, ignore_eos=True)]
    before = answers(llm, good)
    bad = params(Rule(json_object=True), logit_bias={brace: -100.0})
    outputs = llm.generate(["whale 0", "whale 1", "x"], [*good, bad], use_tqdm=False)
    assert outputs[2].outputs[0].finish_reason == "error" and "forbid every token" in (outputs[2].error or "")
    assert [[(c.token_ids, c.text, c.finish_reason) for c in o.outputs] for o in outputs[:2]] == before


def test_a_rule_crosses_a_process_border() -> None:
    spec = StructuredSpec(kind="json_schema", text="{}", after_token_id=7, param="guided_json", parts=(("a", "{}"),))
    request = EngineRequest(request_id="a", prompt_token_ids=(1, 2), sampling=params(spec), eos_token_ids=(1,))
    got = decode_to_engine(encode(Submit(request)))
    assert isinstance(got, Submit) and got.request == request
    assert got.request.sampling.structured_outputs is not None and got.request.sampling.structured_outputs.parts == spec.parts
    assert msgspec.json.encode(spec)


class Stuck:
    """A compiler that hangs on one pattern until it is let go."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.go = threading.Event()

    def compile(self, spec: StructuredSpec) -> Grammar:
        if spec.text == "stuck":
            self.go.wait(60)
            raise GrammarFault("let go")
        return self.inner.compile(spec)  # type: ignore[no-any-return]

    def fill_masks(self, grammars: Sequence[Grammar], bits: Any) -> None:
        self.inner.fill_masks(grammars, bits)


async def test_a_grammar_that_hangs_holds_up_nobody_and_can_be_aborted(toy_dir: Any) -> None:
    """In the engine itself, behind the door: others run, the request waits, an abort takes it out, nothing is left."""
    llm = AsyncLLM.from_config(EngineConfig(model=toy_dir, device="cpu", dtype="float32", block_size=8, max_num_seqs=8))
    core = llm._client.core  # type: ignore[attr-defined]
    store = core.grammars
    store.check(Rule(regex="a"))
    stuck = Stuck(store._compiler.result())
    store._compiler = Future()
    store._compiler.set_result(stuck)
    updates = []
    deliver = llm._deliver

    async def one(name: str, sampling: SamplingParams) -> list[Any]:
        return [delta async for delta in llm.generate([2, 3], sampling, name)]

    await one("warm", params(None))
    llm._client._deliver = lambda got: (updates.extend(got), deliver(got))  # type: ignore[attr-defined]
    for name in ("held", "gone"):
        request = EngineRequest(request_id=name, prompt_token_ids=(2, 3), sampling=params(Rule(regex="stuck")), eos_token_ids=(1,))
        core.send(request)
    deltas = await asyncio.gather(one("a", params(Rule(json=PERSON))), one("b", params(None, ignore_eos=True)))
    assert all(d[-1].finished for d in deltas) and not any(u.request_id in ("held", "gone") for u in updates)
    core.send(AbortRequests(request_ids=("gone",)))
    stuck.go.set()
    while not {"held", "gone"} <= {u.request_id for u in updates if u.is_finished}:
        await asyncio.sleep(0.01)
    ends = {u.request_id: (u.finish_reason, u.error) for u in updates if u.request_id in ("held", "gone")}
    assert ends["gone"] == (FinishReason.ABORT, None)
    assert ends["held"][0] is FinishReason.ERROR and "let go" in str(ends["held"][1])
    await llm.shutdown()
    assert core.scheduler.cache.is_pristine and not core.has_work


async def test_readers_that_leave_take_their_grammar_with_them(toy_dir: Any) -> None:
    llm = AsyncLLM.from_config(EngineConfig(model=toy_dir, device="cpu", dtype="float32", block_size=8, max_num_seqs=8))
    for seed in range(12):
        stream = llm.generate([2, 3], params(Rule(regex="[a-z]{100}"), seed=seed, max_tokens=100), f"r{seed}")
        for _ in range(seed % 4):
            await anext(stream)
        await stream.aclose()
    assert len(llm._client.core._worker._grammars._slots) <= 8  # type: ignore[attr-defined]
    done = [d async for d in llm.generate([2, 3], params(Rule(json=PERSON)), "last")]
    assert done[-1].finished
    core = llm._client.core  # type: ignore[attr-defined]
    await llm.shutdown()
    assert core.scheduler.cache.is_pristine
