# SPDX-License-Identifier: Apache-2.0
"""Fan: the engine streams behind one HTTP request, merged into one. A request with several prompts has several of them.

The usual case, one stream, is read directly: a task and a queue in between would cost more per token than the rest of the door.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Generic, TypeVar

from whalefall.server.sse import cancel

T = TypeVar("T")


class Fan(Generic[T]):
    """Yields (index, item) in the order things happen. Its owner must call `aclose`, which ends every stream in the engine."""

    def __init__(self, sources: Sequence[AsyncGenerator[T, None]]) -> None:
        self._sources = sources
        self._merged = _numbered(sources[0]) if len(sources) == 1 else _merge(sources)
        self._head: asyncio.Task[tuple[int, T] | None] | None = None

    async def wait_first(self, timeout_s: float) -> T | None:
        """The engine's first word, which `items` will still give, or None after `timeout_s`; a fault that comes first is raised here."""
        self._head = asyncio.create_task(self._next())
        await asyncio.wait({self._head}, timeout=timeout_s)
        first = self._head.result() if self._head.done() else None
        return None if first is None else first[1]

    async def items(self) -> AsyncGenerator[tuple[int, T], None]:
        if self._head is not None:
            first = await self._head
            if first is None:
                return
            yield first
        async for numbered in self._merged:
            yield numbered

    async def aclose(self) -> None:
        if self._head is not None:
            await cancel(self._head)
        await self._merged.aclose()
        for source in self._sources:
            await source.aclose()  # one that never started has nothing in the engine

    async def _next(self) -> tuple[int, T] | None:
        return await anext(self._merged, None)


async def _numbered(source: AsyncGenerator[T, None]) -> AsyncGenerator[tuple[int, T], None]:
    async for item in source:
        yield 0, item


async def _merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    # Bounded: a slow reader should wait here and not fill the memory.
    arrived: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(maxsize=64)
    pumps = [asyncio.create_task(_pump(index, source, arrived)) for index, source in enumerate(sources)]
    num_open = len(sources)
    try:
        while num_open:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        await cancel(*pumps)


async def _pump(index: int, source: AsyncGenerator[T, None], arrived: asyncio.Queue[tuple[int, T] | BaseException | None]) -> None:
    try:
        async for item in source:
            await arrived.put((index, item))
        await arrived.put(None)
    except Exception as error:
        await arrived.put(error)
    finally:
        await source.aclose()
