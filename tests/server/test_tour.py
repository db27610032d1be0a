# SPDX-License-Identifier: Apache-2.0
"""A tour of the endpoints with the clients that people use: openai and anthropic, and litellm over both."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.support import HI, asking, engine_of
from tests.server.test_openai_client import serving, talking
from tests.text.reports import PARAMETERS, call

anthropic = pytest.importorskip("anthropic")
THINKS = ("th", "</think>", "an", "swer")
FLAT = [{"type": "function", "name": "bash", "parameters": PARAMETERS}]
BLOCKS = [{"name": "bash", "input_schema": PARAMETERS}]


async def test_openai_over_responses() -> None:
    async with talking(engine_of(*THINKS)) as client:
        first = await client.responses.create(model="whale", input="hi", metadata={"a": "b"})
        assert first.output_text == "answer" and first.status == "completed" and first.usage.output_tokens == 5  # type: ignore[union-attr]
        assert (await client.responses.retrieve(first.id)).output_text == "answer"
        second = await client.responses.create(model="whale", input="more", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        async with client.responses.stream(model="whale", input="hi") as stream:
            kinds = [event.type async for event in stream]
            assert (await stream.get_final_response()).output_text == "answer"
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        made = await client.responses.create(model="whale", input="hi", background=True)
        assert (await client.responses.cancel(made.id)).status in ("completed", "cancelled")
        items = await client.responses.input_items.list(first.id)
        assert [item.type for item in items.data] == ["message"]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="truncation"):
            await client.responses.create(model="whale", input="hi", truncation="auto")


async def test_openai_reads_tool_calls_of_chat_and_responses() -> None:
    chat_tools: Any = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]
    async with talking(engine_of("</think>", call("ls"))) as client:
        chat = await client.chat.completions.create(model="whale", messages=HI, tools=chat_tools)  # type: ignore[arg-type]
        made = chat.choices[0].message.tool_calls[0]  # type: ignore[index]
        assert json.loads(made.function.arguments) == {"command": "ls"}  # type: ignore[union-attr]
        answer = await client.responses.create(model="whale", input="go", tools=FLAT)  # type: ignore[arg-type]
        assert [item.type for item in answer.output][-1] == "function_call"


async def test_anthropic_over_messages() -> None:
    async with serving(engine_of(*THINKS)) as url:
        client = anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
        async with client:
            whole = await client.messages.create(model="whale", max_tokens=50, messages=HI)
            assert [(b.type, getattr(b, "text", None)) for b in whole.content] == [("thinking", None), ("text", "answer")]
            assert whole.stop_reason == "end_turn" and whole.usage.output_tokens == 5
            async with client.messages.stream(model="whale", max_tokens=50, messages=HI) as stream:
                assert "".join([text async for text in stream.text_stream]) == "answer"
                assert (await stream.get_final_message()).content[0].signature
            counted = await client.messages.count_tokens(model="whale", messages=HI)
            assert counted.input_tokens == whole.usage.input_tokens
            again = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "more"}]
            assert (await client.messages.create(model="whale", max_tokens=50, messages=again)).stop_reason == "end_turn"
            with pytest.raises(anthropic.BadRequestError, match="temperature"):
                # litellm and others send it so; the client itself no longer knows the field for every model
                await client.messages.create(model="whale", max_tokens=5, messages=HI, extra_body={"temperature": 3})
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(model="shark", max_tokens=5, messages=HI)


async def test_anthropic_reads_tool_use() -> None:
    async with serving(engine_of("</think>", call("ls"))) as url:
        async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
            whole = await client.messages.create(model="whale", max_tokens=50, messages=HI, tools=BLOCKS)
        assert whole.stop_reason == "tool_use" and whole.content[-1].input == {"command": "ls"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
async def test_litellm_over_chat_and_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network otherwise
    litellm = pytest.importorskip("litellm")
    async with serving(engine_of(*THINKS)) as url:
        plain = await litellm.acompletion(model="openai/whale", messages=HI, api_base=url, api_key="none")
        assert plain.choices[0].message.content == "answer" and plain.choices[0].message.reasoning_content == "th"
        stream = await litellm.acompletion(model="openai/whale", messages=HI, api_base=url, api_key="none", stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "answer"
        block = await litellm.acompletion(
            model="anthropic/whale", messages=HI, api_base=url.removesuffix("/v1"), api_key="none", max_tokens=50
        )
        assert block.choices[0].message.content == "answer"


async def test_tokens_there_and_back() -> None:
    engine = engine_of("x")
    async with asking(engine) as client:
        made = (await client.post("/tokenize", json={"prompt": "hi 🐋", "return_token_strs": True})).json()
        assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) and made["max_model_len"] == 4096
        back = (await client.post("/detokenize", json={"tokens": made["tokens"]})).json()
        assert back == {"prompt": "<｜begin▁of▁sentence｜>hi 🐋"}
        bare = (await client.post("/v1/tokenize", json={"prompt": "hi", "add_special_tokens": False})).json()
        assert bare["count"] == 2 and bare["token_strs"] is None
        talk = (await client.post("/tokenize", json={"messages": HI})).json()
        await client.post("/v1/chat/completions", json={"messages": HI})
        assert talk["tokens"] == engine.seen[-1][0]
        for path, body in (("/tokenize", {}), ("/tokenize", {"prompt": "x", "messages": HI}), ("/detokenize", {"tokens": [10**6]})):
            assert (await client.post(path, json=body)).status_code == 400
        assert (await client.post("/detokenize", json={"tokens": [-1]})).json()["error"]["param"] == "tokens[0]"
