# SPDX-License-Identifier: Apache-2.0
"""A model with a chat template behind the door: all three protocols, whole and streamed."""

from __future__ import annotations

import json

from tests.server.named_events import messages, messages_stream, responses
from tests.server.support import HI, asking, chat_stream, engine_of, joined
from tests.text.test_chat_template import TEMPLATE, TOOLS
from whalefall.testing.scripted import ScriptedLLM

CALL = '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>'


def engine(*pieces: str) -> ScriptedLLM:
    made = engine_of(*pieces, chat_format="none")
    made.tokenizer.chat_template = TEMPLATE
    return made


async def test_reasoning_and_calls_reach_every_protocol() -> None:
    pieces = ("th", "</think>", "ok", CALL[:20], CALL[20:])
    async with asking(engine(*pieces)) as client:
        whole = (await client.post("/v1/chat/completions", json={"messages": HI, "tools": TOOLS})).json()["choices"][0]
    chunks = await chat_stream(engine(*pieces), tools=TOOLS, thinking=None)
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["reasoning_content"] == joined(chunks, "reasoning_content") == "th"
    assert whole["message"]["content"] == joined(chunks) == "ok"
    assert json.loads(whole["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": "x"}
    blocks = [{"name": "f", "input_schema": TOOLS[0]["function"]["parameters"]}]  # type: ignore[index]
    message = await messages(engine(*pieces), tools=blocks)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][-1]["input"] == {"a": "x"}
    events = await messages_stream(engine(*pieces), tools=blocks)
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    flat = [{"type": "function", **TOOLS[0]["function"]}]  # type: ignore[dict-item]
    answer = await responses(engine(*pieces), tools=flat)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]


async def test_the_prompt_is_the_templates() -> None:
    made = engine("x")
    async with asking(made) as client:
        await client.post("/v1/chat/completions", json={"messages": HI, "chat_template_kwargs": {"enable_thinking": False}})
        refused = await client.post("/v1/chat/completions", json={"messages": HI, "tools": TOOLS, "tool_choice": "required"})
    prompt = made.tokenizer.decode(made.seen[0][0], skip_special_tokens=False)
    assert prompt == "<｜begin▁of▁sentence｜><｜User｜>user: hi\n<｜Assistant｜>"
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"
