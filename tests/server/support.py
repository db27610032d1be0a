# SPDX-License-Identifier: Apache-2.0
"""An app around a scripted engine, asked in process; and its answers taken apart."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from whalefall.server.app import create_app
from whalefall.server.config import ServerConfig
from whalefall.testing.scripted import Script, ScriptedLLM

HI = [{"role": "user", "content": "hi"}]
PLAIN = {"messages": HI, "thinking": {"type": "disabled"}}
"""A chat request whose answer begins as content."""


def config(**changes: Any) -> ServerConfig:
    return ServerConfig(**{"served_model_names": ("whale", "alias"), **changes})


def engine_of(*pieces: str | bytes, k: int = 1, **more: Any) -> ScriptedLLM:
    names = ("max_model_len", "chat_format")
    return ScriptedLLM(
        Script(pieces=pieces, pieces_per_step=k, **{n: v for n, v in more.items() if n not in names}),
        **{n: v for n, v in more.items() if n in names},
    )


@asynccontextmanager
async def asking(engine: ScriptedLLM | None, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, config(**changes))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door") as client:
        client.app = app  # type: ignore[attr-defined]
        yield client


async def chat(engine: ScriptedLLM, **body: Any) -> dict[str, Any]:
    return await _post(engine, "/v1/chat/completions", {**PLAIN, **body})


async def complete(engine: ScriptedLLM, **body: Any) -> dict[str, Any]:
    return await _post(engine, "/v1/completions", {"prompt": "hi", **body})


async def _post(engine: ScriptedLLM, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with asking(engine) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return strict_json(answer.text)


async def raw_stream(engine: ScriptedLLM, path: str, body: dict[str, Any], **changes: Any) -> str:
    async with asking(engine, **changes) as client:
        answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer.text


async def chat_stream(engine: ScriptedLLM, **body: Any) -> list[dict[str, Any]]:
    return events(await raw_stream(engine, "/v1/chat/completions", {**PLAIN, **body}))


async def complete_stream(engine: ScriptedLLM, **body: Any) -> list[dict[str, Any]]:
    return events(await raw_stream(engine, "/v1/completions", {"prompt": "hi", **body}))


def events(text: str) -> list[dict[str, Any]]:
    """All events of a stream, which must end with [DONE]."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], text
    data = [block.removeprefix("data: ") for block in blocks[:-2] if not block.startswith(":")]
    return [strict_json(item) for item in data]


def joined(chunks: list[dict[str, Any]], field: str = "content", index: int = 0) -> str:
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(delta.get(field) or "" for delta in deltas)


def finish_reasons(chunks: list[dict[str, Any]]) -> list[str]:
    return [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]


def strict_json(text: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    value = json.loads(text, parse_constant=refuse)
    assert isinstance(value, dict)
    return value
