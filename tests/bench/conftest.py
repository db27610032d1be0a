# SPDX-License-Identifier: Apache-2.0
"""A stub of an OpenAI-compatible server on a real socket, whose answers a test scripts; and clocks that tests move."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from whalefall.bench.http import Address

Script = Callable[[dict[str, Any]], "list[Any] | tuple[int, str]"]
"""Body -> events (objects, or raw bytes sent as they are), or (status, text) for a refusal."""


def text_events(tokens: list[int], total: int | None = None, prompt: int = 7, cached: int | None = None) -> list[Any]:
    """One completions event per entry, carrying so many tokens; usage at the end only."""
    events: list[Any] = [{"choices": [{"index": 0, "text": "x" * n}]} for n in tokens]
    events.append({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    usage = {"prompt_tokens": prompt, "completion_tokens": sum(tokens) if total is None else total, **details}
    return [*events, {"choices": [], "usage": usage}]


class StubServer:
    def __init__(self) -> None:
        self.script: Script = lambda body: text_events([1] * body["max_tokens"])
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.address = Address("http", "127.0.0.1", 0, "")
        self.ending = b"data: [DONE]\n\n"
        self.under_way = self.most_under_way = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.paths.append(head.split(" ")[1])
        length = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        if self.paths[-1].endswith("/models"):
            await self._plain(writer, 200, json.dumps({"data": [{"id": "stub"}]}))
            return
        self.bodies.append(body)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        answer = self.script(body)
        if isinstance(answer, tuple):
            await self._plain(writer, *answer)
        else:
            await self._stream(writer, answer)
        self.under_way -= 1

    async def _plain(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        raw = text.encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def _stream(self, writer: asyncio.StreamWriter, events: list[Any]) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in [*events, self.ending]:
            raw = event if isinstance(event, bytes) else f"data: {json.dumps(event)}\n\n".encode()
            if raw == b"CUT":
                writer.close()
                return
            if raw:
                writer.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()


@pytest_asyncio.fixture
async def server() -> AsyncIterator[StubServer]:
    stub = StubServer()
    listener = await asyncio.start_server(stub.handle, "127.0.0.1", 0)
    stub.address = Address("http", "127.0.0.1", listener.sockets[0].getsockname()[1], "")
    async with listener:
        yield stub


@pytest.fixture
def events() -> Callable[..., list[Any]]:
    return text_events


@pytest.fixture
def ticking() -> Callable[[], float]:
    """A clock that moves one second every time it is read."""
    counter = itertools.count()
    return lambda: float(next(counter))


class FakePace:
    """Time stands still except in sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def now_s(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


@pytest.fixture
def pace() -> FakePace:
    return FakePace()
