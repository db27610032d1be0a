# SPDX-License-Identifier: Apache-2.0
"""The official client over a real socket: plain, streamed, and its own typed errors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from tests.server.support import HI, config, engine_of
from whalefall.server.app import create_app
from whalefall.testing.scripted import ScriptedLLM

OFF = {"thinking": {"type": "disabled"}}


@asynccontextmanager
async def serving(engine: ScriptedLLM, **changes: Any) -> AsyncIterator[str]:
    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self):  # type: ignore[no-untyped-def]
            yield

    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(engine, config(max_body_bytes=10_000, **changes))
    server = Quiet(uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def talking(engine: ScriptedLLM) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(engine) as url, openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_plain_and_streamed_answers_parse() -> None:
    async with talking(engine_of("hel", "lo")) as client:
        whole = await client.chat.completions.create(model="whale", messages=HI, extra_body=OFF, logprobs=True, top_logprobs=1)  # type: ignore[arg-type]
        assert whole.choices[0].message.content == "hello" and whole.choices[0].finish_reason == "stop"
        assert whole.choices[0].logprobs.content[0].top_logprobs[0].token == "hel"  # type: ignore[union-attr, index]
        stream = await client.chat.completions.create(
            model="whale", messages=HI, extra_body=OFF, stream=True, stream_options={"include_usage": True}  # type: ignore[arg-type]
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
        raw = await client.completions.create(model="whale", prompt=["a", "b"], echo=True, logprobs=1)
        assert [choice.text for choice in raw.choices] == ["ahello", "bhello"]
        assert [model.id async for model in client.models.list()] == ["whale", "alias"]


async def test_refusals_are_the_clients_own_errors() -> None:
    async with talking(engine_of("a")) as client:
        with pytest.raises(openai.BadRequestError, match="temperature") as refused:
            await client.chat.completions.create(model="whale", messages=HI, temperature=3)  # type: ignore[arg-type]
        assert refused.value.param == "temperature" and refused.value.code == "invalid_sampling_parameter"
        with pytest.raises(openai.NotFoundError, match="shark"):
            await client.completions.create(model="shark", prompt="x")
        with pytest.raises(openai.APIStatusError) as large:
            await client.completions.create(model="whale", prompt="x" * 20_000)
        assert large.value.status_code == 413


async def test_fault_in_mid_stream_is_the_clients_error() -> None:
    async with talking(engine_of("a", "b", "c", fails_at=2)) as client:
        stream = await client.completions.create(model="whale", prompt="x", stream=True)
        heard = []
        with pytest.raises(openai.APIError, match="scripted fault"):
            async for chunk in stream:
                heard.append(chunk.choices[0].text)
        assert heard == ["a", "b"]


async def test_closed_socket_frees_the_engine() -> None:
    engine = engine_of(*["x"] * 3000, step_s=0.002)
    async with serving(engine) as url, httpx.AsyncClient() as client:
        body = {"prompt": "x", "max_tokens": 3000, "stream": True}
        async with client.stream("POST", f"{url}/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                break
        plain = asyncio.create_task(client.post(f"{url}/completions", json={**body, "stream": False}))
        while len(engine.seen) < 2:
            await asyncio.sleep(0.001)
        plain.cancel()
        while engine.open_requests:
            await asyncio.sleep(0.001)
        assert len(engine.aborted) == 2
