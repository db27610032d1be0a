# SPDX-License-Identifier: Apache-2.0
"""/v1/responses: OpenAI's Responses protocol. Create (whole, streamed, in the background), get, follow, cancel, delete.

The codec makes the events in their right order; here they get their numbers, the engine's counts and what the client asked. The last event
holds the whole answer, so that a streamed answer, a whole one and a stored one are the same object.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from whalefall.core.errors import RequestError
from whalefall.core.sampling import MAX_LOGPROBS
from whalefall.server import sse
from whalefall.server.body import parse, read_json
from whalefall.server.door import Door, Engine
from whalefall.server.errors import envelope
from whalefall.server.events import EventRun, named_event
from whalefall.server.openai.answer import content_size, respond, validate
from whalefall.server.openai.response_store import ENDED, ResponseStore, StoredResponse
from whalefall.server.openai.responses_schema import ResponsesRequest
from whalefall.server.openai.responses_writer import ResponsesWriter
from whalefall.server.openai.schema import check_logprobs
from whalefall.text.chat import ChatPrompt

_CANCEL_WAIT_S = 10.0
"""The engine ends a request within two steps; a cancel waits for that at most so long."""


async def create_response(request: Request) -> Response:
    door: Door = request.app.state.door
    store: ResponseStore = request.app.state.responses
    body = await read_json(request, door.config.max_body_bytes)
    ask = parse(ResponsesRequest, body)
    door.check_model(ask.model)
    engine = door.admit()
    items = _items(body.get("input"))
    if ask.previous_response_id is not None:
        body = {**body, "input": store.history(ask.previous_response_id) + items}
    rule, told = ask.formatted
    size = content_size(body.get("input")) + content_size(ask.instructions)
    prompt: ChatPrompt = await door.encode(lambda: door.codec.encode_responses(body, told), size, "input")
    run = await _start(door, engine, ask, prompt, prompt.structure(rule, engine.tokenizer.token_to_id("</think>")))
    answer = _Answer(door, store, ask, run, items)
    if ask.background:
        return await answer.in_background()
    return await sse.until_disconnect(request.receive, answer.stream() if ask.stream else answer.whole())


async def get_response(request: Request) -> Response:
    record = _stored(request)
    if request.query_params.get("stream") != "true":
        return respond(record.body)
    if record.events is None:
        raise RequestError("stream: only an answer asked for with background: true can be followed", param="stream")
    after = request.query_params.get("starting_after", "-1")
    if not after.removeprefix("-").isdigit():
        raise RequestError(f"starting_after must be a sequence number, got {after[:40]!r}", param="starting_after")
    return _follow(request.app.state.door, record, int(after) + 1)


async def cancel_response(request: Request) -> Response:
    """Ends an answer under way; one that has ended stays as it is."""
    record = _stored(request)
    await _cancel(record)
    return respond(record.body)


async def delete_response(request: Request) -> Response:
    record = _stored(request)
    await _cancel(record)
    request.app.state.responses.drop(record.id)
    return respond({"id": record.id, "object": "response", "deleted": True})


async def list_input_items(request: Request) -> Response:
    record = _stored(request)
    named = [{"id": f"msg_{record.id}_in_{index}", **item} for index, item in enumerate(record.items)]
    ends = {"first_id": named[0]["id"] if named else None, "last_id": named[-1]["id"] if named else None}
    return respond({"object": "list", "data": named, **ends, "has_more": False})


def _stored(request: Request) -> StoredResponse:
    store: ResponseStore = request.app.state.responses
    return store.get(request.path_params["response_id"])


async def _cancel(record: StoredResponse) -> None:
    if record.has_ended.is_set() or record.stop is None:
        return
    record.is_cancelled = True
    await record.stop()
    await asyncio.wait_for(record.has_ended.wait(), _CANCEL_WAIT_S)


def _follow(door: Door, record: StoredResponse, start: int) -> Response:
    async def data() -> AsyncGenerator[bytes, None]:
        async for event in record.follow(max(0, start)):
            yield named_event(event)

    async def nothing() -> None:
        pass

    return sse.EventStream(data(), on_close=nothing, keep_alive_s=door.config.keep_alive_s)


def _items(given: Any) -> list[dict[str, Any]]:
    """The input as a list of items; what is malformed goes through as it is, for the codec to refuse."""
    if given is None:
        return []
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return given if isinstance(given, list) else [given]


async def _start(door: Door, engine: Engine, ask: ResponsesRequest, prompt: ChatPrompt, structure: Any) -> EventRun:
    limit, max_logprobs = ask.max_output_tokens, engine.config.max_logprobs
    check_logprobs(ask.num_top, "top_logprobs", max_logprobs if max_logprobs >= 0 else MAX_LOGPROBS)
    chosen = prompt.default_max_tokens(engine.config.max_model_len) if limit is None else limit
    sampling = ask.chat_sampling(max_logprobs, chosen, structure, logprobs=ask.num_top)
    validate(engine, prompt.token_ids, sampling, "input")
    await engine.prepare(sampling)
    return EventRun(door, engine, prompt, sampling, f"resp_{uuid.uuid4().hex}", ask.cache_use, num_top=ask.num_top)


class _Answer:
    """One request from the first engine output to its last event."""

    def __init__(self, door: Door, store: ResponseStore, ask: ResponsesRequest, run: EventRun, items: list[dict[str, Any]]) -> None:
        self._door = door
        self._store = store
        self._run = run
        self._ask = ask
        self._writer = ResponsesWriter(ask, run, int(time.time()))
        self._record = StoredResponse(
            body={"id": run.id, "output": []},
            items=items,
            previous_id=ask.previous_response_id,
            stop=run.stop,
            events=[] if ask.background else None,
        )

    async def whole(self) -> Response:
        try:
            await self._run.begin()
            async for _ in self._events():
                pass
        except Exception as error:
            for event in self._writer.failure(envelope(error).body["error"]):
                await self._note(event)
            raise
        finally:
            await self._close()
        return respond(self._record.body)

    async def stream(self) -> Response:
        await self._run.begin()
        return sse.EventStream(self._bytes(), on_close=self._close, keep_alive_s=self._door.config.keep_alive_s)

    async def in_background(self) -> Response:
        """The answer goes on whether or not anybody listens."""
        opened = asyncio.Event()
        task = asyncio.create_task(self._live(opened))
        _TASKS.add(task)
        task.add_done_callback(_TASKS.discard)
        await opened.wait()
        return _follow(self._door, self._record, 0) if self._ask.stream else respond(self._record.body)

    async def _live(self, opened: asyncio.Event) -> None:
        try:
            async for _ in self._safe_events(opened):
                opened.set()
        finally:
            opened.set()
            await self._close()

    async def _bytes(self) -> AsyncGenerator[bytes, None]:
        async for event in self._safe_events():
            yield named_event(event)

    async def _safe_events(self, opened: asyncio.Event | None = None) -> AsyncGenerator[dict[str, Any], None]:
        """A fault becomes the last two events: nobody is left to give a status code to."""
        try:
            if opened is not None:
                self._door.active.add(self._run.id)
            async for event in self._events():
                yield event
        except Exception as error:
            for event in self._writer.failure(envelope(error).body["error"]):
                await self._note(event)
                yield event

    async def _events(self) -> AsyncGenerator[dict[str, Any], None]:
        async for step in self._run.steps():
            for raw in step:
                event = self._writer.write(raw, is_cancelled=self._record.is_cancelled)
                await self._note(event)
                yield event

    async def _note(self, event: dict[str, Any]) -> None:
        body = event.get("response")
        if body is not None:
            self._record.body = body
            if event["type"] == "response.created" and self._ask.keeps:
                self._store.put(self._record)
        await self._record.add(event)

    async def _close(self) -> None:
        await self._run.close()
        if self._record.body.get("status") not in ENDED and "status" in self._record.body:
            # The client left before the end: what is stored must not look as if it still went on.
            self._record.body = {**self._record.body, "status": "cancelled" if self._record.is_cancelled else "incomplete"}
        await self._record.end()
        self._store.resize(self._record)


_TASKS: set[asyncio.Task[None]] = set()
"""Answers in the background; the event loop itself holds tasks only weakly."""
