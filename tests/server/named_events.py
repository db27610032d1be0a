# SPDX-License-Identifier: Apache-2.0
"""Streams of the protocols whose events have names, taken apart and checked."""

from __future__ import annotations

from typing import Any

from tests.server.support import asking, raw_stream, strict_json
from whalefall.testing.scripted import ScriptedLLM


def named_events(text: str) -> list[dict[str, Any]]:
    """All events of a stream; each must carry its type as its name, and there is no [DONE]."""
    assert text.endswith("\n\n") and "[DONE]" not in text
    found = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = strict_json(data.removeprefix("data: "))
        assert name == f"event: {event['type']}", block
        found.append(event)
    return found


async def post(engine: ScriptedLLM, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    async with asking(engine) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return strict_json(answer.text)


async def stream(engine: ScriptedLLM, path: str, body: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    return named_events(await raw_stream(engine, path, body, **changes))


async def responses(engine: ScriptedLLM, **body: Any) -> dict[str, Any]:
    return await post(engine, "/v1/responses", {"input": "hi", **body})


async def responses_stream(engine: ScriptedLLM, **body: Any) -> list[dict[str, Any]]:
    """The events, whose numbers must count up from 0."""
    events = await stream(engine, "/v1/responses", {"input": "hi", **body})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


MESSAGES = {"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


async def messages(engine: ScriptedLLM, **body: Any) -> dict[str, Any]:
    return await post(engine, "/v1/messages", {**MESSAGES, **body})


async def messages_stream(engine: ScriptedLLM, **body: Any) -> list[dict[str, Any]]:
    return await stream(engine, "/v1/messages", {**MESSAGES, **body})
