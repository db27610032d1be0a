# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: one `data:` line per event, comments while the engine is silent, and an end when the reader leaves.

Also the other way a client can leave: work that stops when the connection of a plain request is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from whalefall.server.errors import ClientGone, envelope

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(data: Any) -> bytes:
    """JSON holds no line breaks outside strings, and strings escape them: one line is always enough."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class EventStream(Response):
    """Sends events as they come. A client that leaves cancels the producer, which frees everything behind it."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, on_close: Callable[[], Awaitable[None]], keep_alive_s: float) -> None:
        """
        Args:
            on_close: always called once at the end; a generator that never started would not run its own clean-up.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close
        self._keep_alive_s = keep_alive_s
        self._last_sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks: list[asyncio.Task[None]] = []
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._last_sent_s = asyncio.get_running_loop().time()
            writer = asyncio.create_task(self._write(send))
            tasks = [writer, asyncio.create_task(_disconnected(receive)), asyncio.create_task(self._keep_alive(send))]
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            await cancel(*tasks)
            await self._on_close()

    async def _write(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._last_sent_s = clock()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            silent_s = clock() - self._last_sent_s
            if silent_s >= self._keep_alive_s:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                self._last_sent_s = clock()
                silent_s = 0.0
            await asyncio.sleep(self._keep_alive_s - silent_s)


async def with_error_event(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """After the first byte a fault can only be an event: one `error` object, then the end."""
    try:
        async for data in events:
            yield data
    except Exception as error:
        yield event(envelope(error).body)
        yield DONE


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up. The request's body must have been read."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await cancel(task, gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
