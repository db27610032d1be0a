# SPDX-License-Identifier: Apache-2.0
"""The Messages protocol: blocks, events in their order, stop reasons, counts, errors in its own form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.named_events import MESSAGES, messages, messages_stream, post
from tests.server.support import asking, engine_of, raw_stream
from tests.text.reports import PARAMETERS, block, call, invoke, parameter

TOOLS = [{"name": "bash", "description": "d", "input_schema": PARAMETERS}]
OFF = {"thinking": {"type": "disabled"}}


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks as a client builds them."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = ""
        if event["type"] == "content_block_delta":
            (name,) = [name for name in event["delta"] if name != "type"]
            blocks[event["index"]]["input" if name == "partial_json" else name] += event["delta"][name]
        if event["type"] == "content_block_stop" and blocks[event["index"]]["type"] == "tool_use":
            blocks[event["index"]]["input"] = json.loads(blocks[event["index"]]["input"] or "{}")
    return blocks


async def test_events_come_in_this_very_order() -> None:
    events = await messages_stream(engine_of("th", "</think>", "an"))
    names = [event["type"] if event["type"] != "content_block_delta" else event["delta"]["type"] for event in events]
    assert [name for name in names if name != "ping"] == [
        *("message_start", "content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop", "message_delta", "message_stop"),
    ]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts == [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": ""}]


async def test_stream_has_these_very_bytes() -> None:
    text = await raw_stream(engine_of("hello"), "/v1/messages", {**MESSAGES, **OFF})
    answer_id = json.loads(text.split("\n")[1].removeprefix("data: "))["message"]["id"]
    count = (await post(engine_of(), "/v1/messages/count_tokens", {**MESSAGES, **OFF}))["input_tokens"]

    def usage(output: int) -> str:
        head = f'{{"input_tokens":{count},"cache_creation_input_tokens":0,"cache_read_input_tokens":0'
        return f'{head},"output_tokens":{output},"service_tier":"standard"}}'

    assert answer_id.startswith("msg_")
    assert text == (
        'event: message_start\ndata: {"type":"message_start","message":{"id":"' + answer_id + '","type":"message","role":"assistant",'
        '"model":"whale","content":[],"stop_reason":null,"stop_sequence":null,"usage":' + usage(0) + "}}\n\n"
        'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\n\n'
        'event: ping\ndata: {"type":"ping"}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"hello"}}\n\n'
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":'
        + usage(2)
        + '}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'
    )


async def test_without_a_thinking_field_the_reasoning_is_a_block_of_its_own() -> None:
    whole = await messages(engine_of("th", "</think>", "an"))
    assert [(b["type"], b.get("thinking", b.get("text"))) for b in whole["content"]] == [("thinking", "th"), ("text", "an")]
    assert whole["stop_reason"] == "end_turn" and "</think>" not in json.dumps(whole)
    assert whole["content"][0]["signature"]


@pytest.mark.parametrize("k", [1, 2, 7])
async def test_streamed_blocks_equal_the_whole_answer(k: int) -> None:
    calls = block(invoke(parameter("ls -l"), parameter("5", "n", "false")), invoke(parameter("b")))
    pieces = ("let ", "me", "</think>", "an", "swer", *(calls[i : i + 9] for i in range(0, len(calls), 9)))
    whole = await messages(engine_of(*pieces, k=k), tools=TOOLS, max_tokens=500)
    events = await messages_stream(engine_of(*pieces, k=k), tools=TOOLS, max_tokens=500)
    streamed = put_together(events)
    for found in (whole["content"], streamed):
        assert [b["type"] for b in found] == ["thinking", "text", "tool_use", "tool_use"]
        assert [b["input"] for b in found[2:]] == [{"command": "ls -l", "n": 5}, {"command": "b"}]
        assert len({b["id"] for b in found[2:]}) == 2
        assert (found[0]["thinking"], found[1]["text"]) == ("let me", "answer")
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "tool_use"
    assert whole["usage"] == events[-2]["usage"]


async def test_one_delta_per_step() -> None:
    events = await messages_stream(engine_of("a", "b", "c", "d", k=2), **OFF)
    assert [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"] == ["ab", "cd"]


@pytest.mark.parametrize(
    ("pieces", "body", "reason", "stop"),
    [
        (("a", "b"), {}, "end_turn", None),
        (("a", "b", "c"), {"max_tokens": 2}, "max_tokens", None),
        (("a E", "ND b"), {"stop_sequences": ["END"]}, "stop_sequence", "END"),
        (("ok", call("a")), {"tools": TOOLS}, "tool_use", None),
    ],
)
async def test_stop_reasons(pieces: tuple[str, ...], body: dict[str, Any], reason: str, stop: str | None) -> None:
    whole = await messages(engine_of(*pieces), **OFF, **body)
    events = await messages_stream(engine_of(*pieces), **OFF, **body)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": stop}


async def test_nothing_behind_a_stop_sequence_is_counted() -> None:
    engine = engine_of("he", "llo E", "ND m", "ore", "x", k=5)
    whole = await messages(engine, **OFF, stop_sequences=["END"])
    assert whole["content"] == [{"type": "text", "text": "hello "}] and whole["usage"]["output_tokens"] == 3
    assert engine.open_requests == set() and engine.aborted == []


async def test_signed_thinking_is_accepted_back_and_reaches_the_prompt() -> None:
    first = await messages(engine_of("th", "</think>", call("ls")), tools=TOOLS)
    result = [{"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": [{"type": "text", "text": "out"}]}]
    engine = engine_of("x")
    turns = [*MESSAGES["messages"], {"role": "assistant", "content": first["content"]}, {"role": "user", "content": result}]  # type: ignore[misc]
    await messages(engine, tools=TOOLS, messages=turns)
    prompt = engine.tokenizer.decode(engine.seen[0][0], skip_special_tokens=False)
    assert "<think>th</think>" in prompt and "<tool_result>out</tool_result>" in prompt


async def test_a_last_assistant_turn_is_continued() -> None:
    turns = [*MESSAGES["messages"], {"role": "assistant", "content": "1, 2,"}]  # type: ignore[misc]
    for body in ({}, OFF):
        engine = engine_of("\n3")
        whole = await messages(engine, messages=turns, **body)
        assert engine.tokenizer.decode(engine.seen[0][0], skip_special_tokens=False).endswith("</think>1, 2,")
        assert whole["content"] == [{"type": "text", "text": "\n3"}]


async def test_other_vendors_blocks_in_the_history() -> None:
    content = [{"type": "redacted_thinking", "data": "zz"}, {"type": "text", "text": "A"}]
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "DOC"}}
    turns = [*MESSAGES["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": [document]}]  # type: ignore[misc]
    engine = engine_of("x")
    await messages(engine, messages=turns, system=[{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}])
    prompt = engine.tokenizer.decode(engine.seen[0][0], skip_special_tokens=False)
    assert "zz" not in prompt and "DOC" in prompt and "S<｜User｜>" in prompt


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "bash"}])
@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
async def test_a_forced_call_is_held_to_the_schema(choice: dict[str, str], thinking: str) -> None:
    engine = engine_of("x")
    await messages(engine, tools=TOOLS, tool_choice=choice, thinking={"type": thinking})
    rule = engine.seen[0][1].structured_outputs
    assert rule is not None and rule.kind == "grammar" and (rule.after_token_id is not None) == (thinking == "enabled")


async def test_strict_tools_and_output_format_make_rules() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    engine = engine_of("x")
    await messages(engine, **OFF, tools=[{**TOOLS[0], "input_schema": schema, "strict": True}])
    await messages(engine, **OFF, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert [sampling.structured_outputs.kind for _, sampling in engine.seen] == ["grammar", "json_schema"]


async def test_sampling_fields_count() -> None:
    engine = engine_of("x")
    await messages(engine, temperature=0.25, top_p=0.5, top_k=7, seed=3)
    sampling = engine.seen[0][1]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, sampling.max_tokens) == (0.25, 0.5, 7, 3, 50)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "A"}}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]}]}, "tool_result"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop": "x"}, "stop_sequences"),
        ({"n": 2}, "n must be 1"),
        ({"system": 5}, "system"),
        ({"tools": [{"name": "x", "input_schema": {"type": "string"}}]}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nope"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"output_config": {"effort": "zz"}}, "output_config"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"temperature": 3}, "temperature"),
    ],
)
async def test_refusals_have_the_protocols_own_form(change: dict[str, Any], field: str) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if path.endswith("tokens") and set(change) & {"temperature"}:
            continue  # says nothing about the count
        body = await post(engine_of("x"), path, {**MESSAGES, **change}, status=400)
        assert set(body) == {"type", "error"} and body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error" and field in body["error"]["message"]


async def test_statuses_and_types_of_other_failures() -> None:
    async with asking(engine_of("a"), api_keys=("k",)) as client:
        refused = await client.post("/v1/messages", json=MESSAGES)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        for headers in ({"x-api-key": "k"}, {"authorization": "Bearer k"}):
            assert (await client.post("/v1/messages", json=MESSAGES, headers=headers)).status_code == 200
        unknown = await client.post("/v1/messages", json={**MESSAGES, "model": "shark"}, headers={"x-api-key": "k"})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    async with asking(None) as client:
        loading = await client.post("/v1/messages", json=MESSAGES)
        assert (loading.status_code, loading.json()["error"]["type"]) == (503, "overloaded_error")
        assert int(loading.headers["retry-after"]) >= 1
    async with asking(engine_of("a", fails_at=0)) as client:
        for stream in (False, True):
            failed = await client.post("/v1/messages", json={**MESSAGES, "stream": stream})
            assert (failed.status_code, failed.json()["error"]["type"]) == (500, "api_error")


async def test_fault_in_mid_stream_is_one_error_event_at_the_end() -> None:
    events = await messages_stream(engine_of("a", "b", "c", fails_at=2), **OFF)
    assert [event["type"] for event in events].count("error") == 1
    assert events[-1]["error"]["type"] == "api_error" and "scripted fault" in events[-1]["error"]["message"]


async def test_count_is_that_of_the_answers_own_prompt() -> None:
    body = {**MESSAGES, "tools": TOOLS, "system": "S"}
    counted = await post(engine_of("x"), "/v1/messages/count_tokens", body)
    engine = engine_of("x")
    whole = await messages(engine, **body)
    assert counted == {"input_tokens": len(engine.seen[0][0])} == {"input_tokens": whole["usage"]["input_tokens"]}
