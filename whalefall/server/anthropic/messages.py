# SPDX-License-Identifier: Apache-2.0
"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages protocol.

The codec makes the events in their right order; here they get the engine's own numbers, and a whole answer is put together from them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from whalefall.core.errors import Busy
from whalefall.server import sse
from whalefall.server.anthropic.schema import MessagesRequest
from whalefall.server.body import parse, read_json
from whalefall.server.door import Door
from whalefall.server.errors import envelope
from whalefall.server.events import EventRun, named_event
from whalefall.server.openai.answer import content_size, respond, validate
from whalefall.text.chat import ChatPrompt


async def messages(request: Request) -> Response:
    door: Door = request.app.state.door
    body = await read_json(request, door.config.max_body_bytes)
    ask = parse(MessagesRequest, body)
    door.check_model(ask.model)
    engine = door.admit()
    rule, told = ask.formatted
    prompt = await _encode(door, body, ask, told)
    structure = prompt.structure(rule, engine.tokenizer.token_to_id("</think>"))
    limit = prompt.default_max_tokens(engine.config.max_model_len) if ask.max_tokens is None else ask.max_tokens
    sampling = ask.chat_sampling(engine.config.max_logprobs, limit, structure)
    validate(engine, prompt.token_ids, sampling, "messages")
    await engine.prepare(sampling)
    run = EventRun(door, engine, prompt, sampling, f"msg_{uuid.uuid4().hex}", ask.cache_use)
    return await sse.until_disconnect(request.receive, _stream(door, run) if ask.stream else _whole(run))


async def count_tokens(request: Request) -> Response:
    door: Door = request.app.state.door
    body = await read_json(request, door.config.max_body_bytes)
    ask = parse(MessagesRequest, body)
    door.check_model(ask.model)
    door.admit()
    prompt = await _encode(door, body, ask, ask.formatted[1])
    return respond({"input_tokens": len(prompt.token_ids)})


async def _encode(door: Door, body: dict[str, Any], ask: MessagesRequest, told: Any) -> ChatPrompt:
    size = content_size(body.get("messages")) + content_size([{"content": body.get("system")}])
    return await door.encode(lambda: door.codec.encode_messages(body, told, ask.stop_sequences or ()), size, "messages")


async def _whole(run: EventRun) -> Response:
    message: dict[str, Any] = {}
    try:
        await run.begin()
        async for event in _events(run):
            _grow(message, event)
    finally:
        await run.close()
    return respond(message)


async def _stream(door: Door, run: EventRun) -> Response:
    await run.begin()
    return sse.EventStream(_bytes(run), on_close=run.close, keep_alive_s=door.config.keep_alive_s)


async def _bytes(run: EventRun) -> AsyncGenerator[bytes, None]:
    try:
        async for event in _events(run):
            yield named_event(event)
    except Exception as error:
        # After the first byte a fault can only be an event.
        yield named_event(envelope(error).messages_body)


async def _events(run: EventRun) -> AsyncGenerator[dict[str, Any], None]:
    async for step in run.steps():
        if run.finish_reason == "abort":
            # The protocol has no reason for it: an error tells the client that another try is worth it.
            raise Busy("the server ended this answer before it was complete", retry_after_s=1.0)
        for event in step:
            if event["type"] == "message_start":
                event["message"]["usage"] |= _usage(run) | {"output_tokens": 0}
            elif event["type"] == "message_delta":
                event["usage"] |= _usage(run)
            yield event


def _usage(run: EventRun) -> dict[str, int]:
    """input_tokens counts what was not in the cache, as this protocol has it."""
    usage = run.usage
    fresh = usage.prompt_tokens - usage.cached_tokens
    return {"input_tokens": fresh, "cache_read_input_tokens": usage.cached_tokens, "output_tokens": usage.completion_tokens}


def _grow(message: dict[str, Any], event: dict[str, Any]) -> None:
    """Put one event into a whole answer."""
    kind = event["type"]
    if kind == "message_start":
        message |= event["message"]
    elif kind == "content_block_start":
        message["content"].append({**event["content_block"], **({"input": ""} if event["content_block"]["type"] == "tool_use" else {})})
    elif kind == "content_block_delta":
        block, delta = message["content"][event["index"]], event["delta"]
        field = {"input_json_delta": "input"}.get(delta["type"], delta["type"].removesuffix("_delta"))
        block[field] = block.get(field, "") + delta["partial_json" if field == "input" else field]
    elif kind == "content_block_stop" and message["content"][event["index"]]["type"] == "tool_use":
        block = message["content"][event["index"]]
        block["input"] = _arguments(block["input"])
    elif kind == "message_delta":
        message |= event["delta"]
        message["usage"] |= event["usage"]


def _arguments(text: str) -> Any:
    """A call that was cut off has no arguments, and the stop reason says so."""
    try:
        return json.loads(text) if text else {}
    except ValueError:
        return {}
