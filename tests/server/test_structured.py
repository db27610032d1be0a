# SPDX-License-Identifier: Apache-2.0
"""Structured output over HTTP, on a real engine with random weights that speaks V4.1's chat format."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.server.support import HI, chat, config, engine_of, events, strict_json
from whalefall import AsyncLLM, EngineConfig
from whalefall.models.toy.config import ToyConfig
from whalefall.server.app import create_app
from whalefall.testing.toy_checkpoint import write_toy_checkpoint

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
OFF = {"thinking": {"type": "disabled"}}
PERSON = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["whale", "fall"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {
            "type": "object",
            "properties": {"command": {"enum": ["ls", "pwd"]}, "n": {"type": "boolean"}},
            "required": ["command"],
        },
    },
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"deep": {"type": "boolean"}}}}}


@pytest.fixture(scope="module")
def toy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"), ToyConfig(max_position_embeddings=2048), seed=3)


@asynccontextmanager
async def door(toy_dir: Path, **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncLLM]]:
    settings = {"device": "cpu", "dtype": "float32", "block_size": 64, "max_num_seqs": 8, "max_model_len": 2048, **options}
    llm = AsyncLLM.from_config(EngineConfig(model=toy_dir, **settings))
    llm.definition = SimpleNamespace(chat_format="deepseek_v41")  # type: ignore[assignment]
    app = create_app(llm, config())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door", timeout=120) as client:
        yield client, llm
    await llm.shutdown()
    cache = llm._client.core.scheduler.cache  # type: ignore[attr-defined]
    cache.check()
    assert cache.is_pristine


async def ask(client: httpx.AsyncClient, path: str = CHAT, **body: Any) -> dict[str, Any]:
    base = {"messages": HI, "max_tokens": 300} if path == CHAT else {"prompt": "hi", "max_tokens": 300}
    answer = await client.post(path, json={**base, **body})
    assert answer.status_code == 200, answer.text
    return strict_json(answer.text)


def check_person(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"n", "kind"} and 0 <= value["n"] <= 99 and value["kind"] in ("whale", "fall")


async def test_every_way_to_ask_for_a_shape(toy_dir: Path) -> None:
    schema = {"name": "person", "schema": PERSON}
    asked: list[tuple[dict[str, Any], Any]] = [
        ({"response_format": {"type": "json_schema", "json_schema": schema}}, check_person),
        ({"response_format": {"type": "json_schema", "json_schema": {**schema, "strict": True}}}, check_person),
        ({"structured_outputs": {"json": PERSON}}, check_person),
        ({"guided_json": json.dumps(PERSON)}, check_person),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, lambda text: re.fullmatch("[a-c]{3}", text) or pytest.fail(text)),
        ({"guided_regex": "^[a-c]{3}$"}, lambda text: re.fullmatch("[a-c]{3}", text) or pytest.fail(text)),
        ({"structured_outputs": {"choice": ["red", "green"]}}, lambda text: text in ("red", "green") or pytest.fail(text)),
        ({"guided_choice": ["red", "green"]}, lambda text: text in ("red", "green") or pytest.fail(text)),
        ({"guided_grammar": 'root ::= "yes" | "no" root'}, lambda text: re.fullmatch("(no)*yes", text) or pytest.fail(text)),
    ]
    async with door(toy_dir) as (client, _):
        for path in (CHAT, RAW):
            bodies = [ask(client, path, **body, **(OFF if path == CHAT else {}), n=2, seed=3) for body, _ in asked]
            for (body, check), answer in zip(asked, await asyncio.gather(*bodies), strict=True):
                for choice in answer["choices"]:
                    assert choice["finish_reason"] == "stop", body
                    check(choice["message"]["content"] if path == CHAT else choice["text"])


async def test_streamed_pieces_and_logprobs_are_those_of_the_whole_answer(toy_dir: Path) -> None:
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}, "seed": 9, "logprobs": True}
    async with door(toy_dir) as (client, _):
        whole = (await ask(client, **body, **OFF, top_logprobs=3))["choices"][0]
        answer = await client.post(CHAT, json={"messages": HI, "max_tokens": 300, **body, **OFF, "top_logprobs": 3, "stream": True})
        chunks = [chunk["choices"][0] for chunk in events(answer.text) if chunk["choices"]]
    assert "".join(c["delta"].get("content") or "" for c in chunks) == whole["message"]["content"]
    entries = [entry for c in chunks for entry in (c["logprobs"] or {}).get("content", ())]
    assert entries == whole["logprobs"]["content"] and len(entries) >= len(whole["message"]["content"]) // 2


async def test_thinking_is_free_and_the_content_is_not(toy_dir: Path) -> None:
    """The mask begins behind `</think>`, which is never part of the content."""
    async with door(toy_dir) as (client, llm):
        end = llm.tokenizer.token_to_id("</think>")
        body = {"guided_json": PERSON, "logit_bias": {str(end): 4.5}}
        answers = await asyncio.gather(*(ask(client, **body, seed=s) for s in range(8)))
    ended = [a["choices"][0] for a in answers if a["choices"][0]["finish_reason"] == "stop" and a["choices"][0]["message"]["content"]]
    assert len(ended) >= 2
    for choice in ended:
        check_person(choice["message"]["content"])
    assert any(choice["message"].get("reasoning_content") for choice in ended)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "bash"}}])
async def test_a_forced_tool_works_with_and_without_thinking(toy_dir: Path, choice: Any) -> None:
    async with door(toy_dir) as (client, llm):
        end = llm.tokenizer.token_to_id("</think>")
        for more in ({"logit_bias": {str(end): 100}}, OFF):
            body = {"tools": [BASH, LOOK], "tool_choice": choice, "max_tokens": 400, **more}
            for answer in await asyncio.gather(*(ask(client, **body, seed=seed) for seed in range(3))):
                (item,) = answer["choices"]
                assert item["finish_reason"] == "tool_calls" and not item["message"]["content"]
                (call,) = item["message"]["tool_calls"]
                arguments = json.loads(call["function"]["arguments"])
                if call["function"]["name"] == "bash":
                    assert arguments["command"] in ("ls", "pwd") and isinstance(arguments.get("n", True), bool)
                else:
                    assert choice == "required" and isinstance(arguments.get("deep", True), bool)


async def test_parallel_calls_come_when_they_are_asked_for(toy_dir: Path) -> None:
    async with door(toy_dir) as (client, _):
        body = {"tools": [BASH, LOOK], "tool_choice": "required", "parallel_tool_calls": True, "max_tokens": 700, **OFF}
        answers = await asyncio.gather(*(ask(client, **body, seed=s) for s in range(6)))
    counts = [len(a["choices"][0]["message"]["tool_calls"]) for a in answers if a["choices"][0]["finish_reason"] == "tool_calls"]
    assert counts and max(counts) > 1


ODD = [
    *({"guided_json": schema} for schema in ("", {"type": "array", "items": 5}, {"$ref": "#/nope"}, {"type": "string", "pattern": "("})),
    {"guided_regex": "("},
    {"guided_grammar": "@@"},
    {"structured_outputs": {"json_object": False}},
]


async def test_odd_requests_are_refused_while_good_ones_go_on(toy_dir: Path) -> None:
    good = [{"guided_json": PERSON, "seed": s, **OFF} for s in range(2)] + [{"seed": s, "max_tokens": 60, **OFF} for s in range(2)]
    async with door(toy_dir) as (client, _):
        before = [a["choices"] for a in await asyncio.gather(*(ask(client, **body) for body in good))]
        running = [asyncio.create_task(ask(client, **body)) for body in good]
        for body in ODD:
            answer = await client.post(CHAT, json={"messages": HI, **body})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"].split(".")[0] == next(iter(body))
        assert (await client.get("/health")).status_code == 200
        assert [a["choices"] for a in await asyncio.gather(*running)] == before
        empty = await ask(client, guided_json={}, max_tokens=60, **OFF)
        if empty["choices"][0]["finish_reason"] == "stop":
            json.loads(empty["choices"][0]["message"]["content"])


def nested(depth: int) -> dict[str, Any]:
    if not depth:
        return {"type": "string"}
    inner = nested(depth - 1)
    return {"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"a": inner, "b": inner}}]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
        {"type": "string", "maxLength": 100_000},
        nested(10),
    ],
    ids=["2000 properties", "long string", "deep anyOf"],
)
async def test_heavy_schemas_compile_or_are_refused_and_others_go_on(toy_dir: Path, schema: dict[str, Any]) -> None:
    async with door(toy_dir) as (client, _):
        heavy = asyncio.create_task(client.post(CHAT, json={"messages": HI, "guided_json": schema, "max_tokens": 40, **OFF}))
        plain = await ask(client, max_tokens=40, ignore_eos=True, **OFF)
        assert plain["usage"]["completion_tokens"] == 40
        answer = await asyncio.wait_for(heavy, 60)
    assert answer.status_code in (200, 400), answer.text


async def test_the_prompt_says_the_format_and_needs_no_magic_word() -> None:
    """The reference library wants the word json in the prompt of a json_object request; an answer held to JSON needs no such thing."""
    engine = engine_of("{", "}")
    await chat(engine, response_format={"type": "json_object"})
    await chat(engine, response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}})
    texts = [engine.tokenizer.decode(ids, skip_special_tokens=False) for ids, _ in engine.seen]
    assert '{"type": "json_object"}' in texts[0] and '"enum": ["whale", "fall"]' in texts[1]
    specs = [sampling.structured_outputs for _, sampling in engine.seen]
    assert [spec.kind for spec in specs if spec is not None] == ["json_object", "json_schema"]


async def test_strict_closes_what_the_schema_leaves_open() -> None:
    engine = engine_of("{", "}")
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"enum": [{"properties": {}}]}}}}}
    for strict in (True, False, None):
        form = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema, "strict": strict}}
        await chat(engine, response_format=form)
    specs = [sampling.structured_outputs for _, sampling in engine.seen]
    closed, *open_ones = [json.loads(spec.text) for spec in specs if spec is not None]
    assert closed["additionalProperties"] is False and closed["required"] == ["a"]
    assert (
        closed["properties"]["a"]["required"] == ["b"]
        and closed["properties"]["a"]["properties"] == schema["properties"]["a"]["properties"]
    )
    assert open_ones == [schema, schema]


async def test_text_format_and_null_fields_mean_no_rule() -> None:
    engine = engine_of("a")
    await chat(engine, response_format={"type": "text"}, guided_json=None, structured_outputs=None)
    assert engine.seen[0][1].structured_outputs is None
