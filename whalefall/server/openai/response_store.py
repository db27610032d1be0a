# SPDX-License-Identifier: Apache-2.0
"""ResponseStore: Responses answers kept for GET, cancel and previous_response_id. Bounded by count and bytes; the oldest go first.

Lives in the memory of this process and dies with it. An answer under way is never dropped. Ids are random; who knows one may read it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from whalefall.core.errors import RequestError

ENDED = ("completed", "incomplete", "failed", "cancelled")


class UnknownResponse(RequestError):
    http_status = 404
    code = "response_not_found"


@dataclass(slots=True)
class StoredResponse:
    """One answer and what it was asked with."""

    body: dict[str, Any]
    """The response object as it stands now."""
    items: list[dict[str, Any]]
    """The input of this request alone, without what previous_response_id brought along."""
    previous_id: str | None = None
    stop: Callable[[], Awaitable[None]] | None = None
    """Ends the answer in the engine."""
    is_cancelled: bool = False
    events: list[dict[str, Any]] | None = None
    """All events so far, of an answer in the background."""
    num_bytes: int = 0
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    _moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def id(self) -> str:
        return str(self.body["id"])

    async def add(self, event: dict[str, Any]) -> None:
        """Note an event; readers of `follow` hear of it."""
        async with self._moved:
            if self.events is not None:
                self.events.append(event)
            self._moved.notify_all()

    async def end(self) -> None:
        async with self._moved:
            self.has_ended.set()
            self._moved.notify_all()

    async def follow(self, start: int = 0) -> AsyncGenerator[dict[str, Any], None]:
        """Events from number `start` on, those to come as well, until the end."""
        events, place = self.events if self.events is not None else [], start
        while True:
            for event in events[place:]:
                yield event
                place += 1
            if self.has_ended.is_set() and place >= len(events):
                return
            async with self._moved:
                if place >= len(events) and not self.has_ended.is_set():
                    await self._moved.wait()


class ResponseStore:
    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._records: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """Size of what is kept, as JSON."""
        return self._num_bytes

    def put(self, record: StoredResponse) -> None:
        self._records[record.id] = record
        self.resize(record)

    def resize(self, record: StoredResponse) -> None:
        """The record has grown: count it anew and drop old ones if there is too much."""
        if record.id not in self._records:
            return
        self._num_bytes -= record.num_bytes
        record.num_bytes = len(orjson.dumps([record.body, record.items, record.events]))
        self._num_bytes += record.num_bytes
        for old in list(self._records.values()):
            if len(self._records) <= self._max_responses and self._num_bytes <= self._max_bytes:
                return
            if old.has_ended.is_set():
                self.drop(old.id)

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises UnknownResponse when it is not there (never was, was not to be stored, or had to make room)."""
        record = self._records.get(response_id)
        if record is None:
            text = f"there is no response {response_id[:80]!r}: unknown, asked with store: false, or gone to make room"
            raise UnknownResponse(text, param=param)
        self._records.move_to_end(response_id)
        return record

    def drop(self, response_id: str) -> None:
        record = self._records.pop(response_id, None)
        if record is not None:
            self._num_bytes -= record.num_bytes

    def history(self, response_id: str) -> list[dict[str, Any]]:
        """Input and output items of a chain of answers, oldest first."""
        chain: list[StoredResponse] = []
        next_id: str | None = response_id
        while next_id is not None:
            record = self.get(next_id, "previous_response_id")
            if not record.has_ended.is_set():
                text = f"previous_response_id {next_id!r} is still being answered"
                raise RequestError(text, param="previous_response_id")
            chain.append(record)
            next_id = record.previous_id
        return [item for record in reversed(chain) for item in (*record.items, *record.body["output"])]
