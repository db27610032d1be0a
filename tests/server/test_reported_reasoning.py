# SPDX-License-Identifier: Apache-2.0
"""Reasoning and content that other engines are publicly reported to have mixed up; bodies that made them fail. All three protocols."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.named_events import MESSAGES, messages, messages_stream, responses, responses_stream
from tests.server.support import HI, asking, chat_stream, engine_of, joined
from whalefall.testing.scripted import EOS, ScriptedLLM

SWITCHES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"thinking": {"type": "disabled"}}, False),
    ({"thinking": {"type": "enabled"}}, True),
    ({"reasoning_effort": "none"}, False),
    ({"reasoning_effort": "high"}, True),
    ({"chat_template_kwargs": {"thinking": False}}, False),
    ({"chat_template_kwargs": {"enable_thinking": False}}, False),
]


async def chat(engine: ScriptedLLM, **body: Any) -> dict[str, Any]:
    async with asking(engine) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": HI, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]  # type: ignore[no-any-return]


def opens_thinking(engine: ScriptedLLM) -> bool:
    prompt = engine.tokenizer.decode(engine.seen[0][0], skip_special_tokens=False)
    assert prompt.endswith(("<think>", "</think>"))
    return prompt.endswith("<think>")


# --- B1: one function decides for prompt and parser ---


@pytest.mark.parametrize(("body", "is_reasoning"), SWITCHES)
async def test_b1_chat(body: dict[str, Any], is_reasoning: bool) -> None:
    engine = engine_of("hello")
    message = await chat(engine, **body)
    assert opens_thinking(engine) == is_reasoning
    assert (message["content"], message.get("reasoning_content")) == (("", "hello") if is_reasoning else ("hello", None))
    chunks = await chat_stream(engine_of("hello"), **{"thinking": None, **body})
    assert joined(chunks, "reasoning_content" if is_reasoning else "content") == "hello"


@pytest.mark.parametrize(("body", "is_reasoning"), SWITCHES)
async def test_b1_responses(body: dict[str, Any], is_reasoning: bool) -> None:
    effort = body.get("reasoning_effort")
    asked = {"reasoning": {"effort": effort}} if effort else body
    engine = engine_of("hello")
    whole = await responses(engine, **asked)
    assert opens_thinking(engine) == is_reasoning
    assert [item["type"] for item in whole["output"]] == (["reasoning"] if is_reasoning else ["message"])
    events = await responses_stream(engine_of("hello"), **asked)
    assert [e["type"] for e in events if e["type"].endswith(".delta")] == [
        f"response.{'reasoning' if is_reasoning else 'output'}_text.delta"
    ]


@pytest.mark.parametrize(("body", "is_reasoning"), [pair for pair in SWITCHES if "reasoning_effort" not in pair[0]])
async def test_b1_messages(body: dict[str, Any], is_reasoning: bool) -> None:
    engine = engine_of("hello")
    whole = await messages(engine, **body)
    assert opens_thinking(engine) == is_reasoning
    assert [item["type"] for item in whole["content"]] == (["thinking"] if is_reasoning else ["text"])
    events = await messages_stream(engine_of("hello"), **body)
    deltas = {event["delta"]["type"] for event in events if event["type"] == "content_block_delta"} - {"signature_delta"}
    assert deltas == {"thinking_delta" if is_reasoning else "text_delta"}


# --- B2: an answer that never closes its thinking stays reasoning, streamed and not; no field holds the end marker ---


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True}])
async def test_b2_an_open_thinking_is_reasoning_everywhere(more: dict[str, Any]) -> None:
    pieces = ("Good", " morning", *((EOS,) if more else ()))
    message = await chat(engine_of(*pieces), **more)
    chunks = await chat_stream(engine_of(*pieces), thinking=None, **more)
    assert message["reasoning_content"] == joined(chunks, "reasoning_content") == "Good morning"
    assert message["content"] == joined(chunks) == ""
    whole, told = await messages(engine_of(*pieces), **more), await responses(engine_of(*pieces), **more)
    assert whole["content"][0]["thinking"] == told["output"][0]["content"][0]["text"] == "Good morning"
    streams = [await messages_stream(engine_of(*pieces), **more), await responses_stream(engine_of(*pieces), **more)]
    assert EOS not in json.dumps([message, chunks, whole, told, streams], ensure_ascii=False)


# --- B7: both names ---


async def test_b7_reasoning_has_both_names() -> None:
    pieces = ("a", "</think>", "b")
    message = await chat(engine_of(*pieces))
    chunks = await chat_stream(engine_of(*pieces), thinking=None)
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("a", "a", "b")
    assert (joined(chunks, "reasoning_content"), joined(chunks, "reasoning"), joined(chunks)) == ("a", "a", "b")


# --- C4: bodies with nothing where text should be ---

CALL = [{"id": "1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]
NOTHING: list[tuple[list[Any], int]] = [
    ([{"role": "user", "content": None}], 400),
    ([*HI, {"role": "assistant", "content": None, "tool_calls": CALL}, {"role": "tool", "tool_call_id": "1", "content": None}], 400),
    ([*HI, {"role": "assistant", "content": None, "tool_calls": CALL}, {"role": "tool", "tool_call_id": "1", "content": "r"}], 200),
    ([*HI, {"role": "assistant", "content": "", "tool_calls": CALL}, {"role": "tool", "tool_call_id": "1", "content": ""}], 200),
    ([*HI, {"role": "assistant", "content": [], "tool_calls": CALL}, {"role": "tool", "tool_call_id": "1", "content": []}], 200),
    ([{"role": "developer", "content": ""}, *HI], 200),
    ([{"role": "user", "content": ""}], 200),
    ([{"role": "user", "content": []}], 200),
    ([*HI, {"role": "assistant", "content": None}], 400),
    ([*HI, {"role": "assistant", "content": None, "tool_calls": []}, *HI], 400),
    ([*HI, {"role": "assistant", "content": None, "tool_calls": None}, *HI], 400),
]  # fmt: skip


@pytest.mark.parametrize(("history", "status"), NOTHING)
async def test_c4_nothing_is_never_a_word_and_never_a_fault(history: list[Any], status: int) -> None:
    engine = engine_of("x")
    async with asking(engine) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": history})
    assert answer.status_code == status, answer.text
    if status == 200:
        prompt = engine.tokenizer.decode(engine.seen[0][0], skip_special_tokens=False)
        assert "None" not in prompt and "null" not in prompt
    else:
        assert answer.json()["error"]["param"].startswith("messages[") and "content" in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [None, [], [None], [{"type": "text", "text": None}], [{"type": "text"}], 5, {}])
async def test_c4_the_other_protocols_never_fail_either(content: Any) -> None:
    async with asking(engine_of("x")) as client:
        for path, body in (
            ("/v1/messages", {**MESSAGES, "messages": [{"role": "user", "content": content}]}),
            ("/v1/messages", {**MESSAGES, "system": content}),
            ("/v1/responses", {"input": [{"role": "user", "content": content}]}),
            ("/v1/responses", {"input": "x", "instructions": content}),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400:
                assert answer.json()["error"]["message"]


async def test_c5_roles_over_http() -> None:
    engine = engine_of("x")
    async with asking(engine) as client:
        fine = await client.post("/v1/chat/completions", json={"messages": [{"role": "developer", "content": "D"}, *HI]})
        robot = await client.post("/v1/chat/completions", json={"messages": [*HI, {"role": "robot", "content": "D"}]})
    assert fine.status_code == 200 and robot.status_code == 400
    error = robot.json()["error"]
    assert error["param"] == "messages[1].role" and "robot" in error["message"] and "assistant" in error["message"]
