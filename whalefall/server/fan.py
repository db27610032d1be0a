# SPDX-License-Identifier: Apache-2.0
"""Fan: the engine streams behind one HTTP request, merged into one. A request with several prompts or answers has several of them."""

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
        # Bounded: a slow reader should wait here and not fill the memory.
        self._queue: asyncio.Queue[tuple[int, T | BaseException | None]] = asyncio.Queue(maxsize=64)
        self._pumps: list[asyncio.Task[None]] = []
        self._open = set(range(len(sources)))
        self._head: tuple[int, T | BaseException | None] | None = None

    async def wait_first(self, timeout_s: float) -> T | None:
        """The engine's first word, which `items` will still give, or None after `timeout_s`; a fault that comes first is raised here."""
        self._start()
        try:
            self._head = await asyncio.wait_for(self._queue.get(), timeout_s)
        except TimeoutError:
            return None
        if isinstance(self._head[1], BaseException):
            raise self._head[1]
        return self._head[1]

    async def items(self) -> AsyncGenerator[tuple[int, T], None]:
        self._start()
        while self._open:
            index, item = self._head or await self._queue.get()
            self._head = None
            if isinstance(item, BaseException):
                raise item
            if item is None:
                self._open.discard(index)
            elif index in self._open:
                yield index, item

    async def close_one(self, index: int) -> None:
        """End one stream; what it already sent is dropped."""
        self._open.discard(index)
        await cancel(self._pumps[index])

    async def aclose(self) -> None:
        await cancel(*self._pumps)
        for source in self._sources:
            await source.aclose()  # one that never started has nothing in the engine

    def _start(self) -> None:
        if not self._pumps:
            self._pumps = [asyncio.create_task(self._pump(index)) for index in range(len(self._sources))]

    async def _pump(self, index: int) -> None:
        source = self._sources[index]
        try:
            async for item in source:
                await self._queue.put((index, item))
            await self._queue.put((index, None))
        except Exception as error:
            await self._queue.put((index, error))
        finally:
            await source.aclose()
