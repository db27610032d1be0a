# SPDX-License-Identifier: Apache-2.0
"""A small HTTP/1.1 client for event streams on asyncio alone: one connection a request, so that a dead server is a failed request and
never a stuck pool. Understands chunked and plain bodies and the event-stream format; follows no redirects.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 24
"""A final event may carry thousands of logprobs on one line."""


class HttpError(Exception):
    """The server answered with an error status, broke the protocol, or closed too early."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Address:
    scheme: str
    host: str
    port: int
    base_path: str

    @classmethod
    def parse(cls, url: str) -> Address:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http or https address, e.g. http://127.0.0.1:8000")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))


@asynccontextmanager
async def request(
    address: Address, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Response]:
    """Send one request and give the response once its head has arrived; the connection closes with the block."""
    context = ssl.create_default_context() if address.scheme == "https" else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context, limit=MAX_LINE_BYTES)
    try:
        payload = b"" if body is None else json.dumps(body, ensure_ascii=False).encode()
        fields = {"Host": f"{address.host}:{address.port}", "Accept": "text/event-stream, application/json", "Connection": "close"}
        if body is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(payload))}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**fields, **(headers or {})}.items())
        writer.write(f"{method} {address.base_path}{path} HTTP/1.1\r\n{head}\r\n".encode() + payload)
        await writer.drain()
        yield await _read_head(reader)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


class Response:
    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def read(self) -> bytes:
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> AsyncIterator[bytes]:
        """Body bytes as they arrive."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            async for part in self._chunks():
                yield part
            return
        left = int(self.headers["content-length"]) if "content-length" in self.headers else None
        while left is None or left > 0:
            part = await self._reader.read(65_536 if left is None else min(left, 65_536))
            if not part:
                if left is not None:
                    raise HttpError(f"connection closed with {left} bytes missing", self.status)
                return
            left = None if left is None else left - len(part)
            yield part

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            line = await self._reader.readline()
            if not line.endswith(b"\n"):
                raise HttpError("connection closed in the middle of the stream", self.status)
            size = int(line.split(b";")[0], 16)
            try:
                part = await self._reader.readexactly(size + 2)
            except asyncio.IncompleteReadError as error:
                raise HttpError("connection closed in the middle of the stream", self.status) from error
            if size == 0:
                return
            yield part[:-2]

    async def events(self) -> AsyncIterator[str]:
        """The data of each server-sent event; comments and other fields are skipped, data lines of one event are joined."""
        async for event in parse_events(self.parts()):
            yield event


async def parse_events(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    rest, data = b"", []
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for raw in lines:
            line = raw.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode())
            elif not line and data:
                yield "\n".join(data)
                data = []
    if data:
        yield "\n".join(data)


async def _read_head(reader: asyncio.StreamReader) -> Response:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        raise HttpError("connection closed before an answer") from error
    first, *lines = raw[:MAX_HEAD_BYTES].decode("latin-1").split("\r\n")
    parts = first.split(" ", 2)
    if len(parts) < 2 or not parts[1].isdigit():
        raise HttpError(f"no HTTP answer: {first[:80]!r}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
    return Response(int(parts[1]), headers, reader)
