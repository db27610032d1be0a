# SPDX-License-Identifier: Apache-2.0
"""Ask an OpenAI-compatible server and note when its tokens come.

Tokens of a chunk are counted by the most exact thing the server sends: token ids, else logprobs, else usage that grows with every chunk
(`continuous_usage_stats`), else the final usage, spread over the chunks by the length of their text, else one token a chunk.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from whalefall.bench.http import Address, HttpError, Response, request
from whalefall.bench.records import Arrival, CountedBy, Record

Endpoint = Literal["completions", "chat"]
PATHS: dict[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request, before it is sent."""

    prompt: str | list[int] | list[dict[str, Any]]
    """Text or token ids for completions, messages for chat."""
    max_tokens: int
    label: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Target:
    address: Address
    endpoint: Endpoint
    model: str
    api_key: str | None = None
    continuous_usage: bool = True
    """Ask for usage in every chunk; servers that know no such option may refuse the request."""
    token_ids: bool = False
    """Ask for the output's token ids (vLLM's `return_token_ids`)."""
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout_s: float | None = None
    """Give up on a request after this long; None waits for ever."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every body."""

    def body(self, ask: Ask) -> dict[str, Any]:
        options: dict[str, Any] = {"include_usage": True}
        if self.continuous_usage:
            options["continuous_usage_stats"] = True
        body: dict[str, Any] = {
            "model": self.model,
            "messages" if self.endpoint == "chat" else "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": options,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.token_ids:
            body["return_token_ids"] = True
        return body | dict(self.extra) | dict(ask.extra)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


async def send(target: Target, ask: Ask, clock: Callable[[], float] = time.perf_counter) -> Record:
    """Send one request and read its stream to the end. A failure of any kind is a record with an error, never an exception."""
    reading = _Reading(clock)
    sent_s = clock()
    error: str | None = None
    try:
        async with asyncio.timeout(target.timeout_s):
            async with request(target.address, "POST", PATHS[target.endpoint], target.body(ask), target.headers) as response:
                await _read(response, reading)
    except HttpError as failure:
        error = f"{failure.status}: {failure}" if failure.status else str(failure)
    except (OSError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return reading.record(sent_s, clock(), error, ask.label)


async def list_models(address: Address, api_key: str | None = None) -> list[str]:
    """Names under /v1/models, the way to learn what the server calls its model."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with request(address, "GET", "/v1/models", headers=headers) as response:
        raw = await response.read()
        if response.status != 200:
            raise HttpError(raw[:300].decode(errors="replace"), response.status)
    return [str(item["id"]) for item in json.loads(raw)["data"]]


async def _read(response: Response, reading: _Reading) -> None:
    if response.status != 200:
        raise HttpError(" ".join((await response.read())[:400].decode(errors="replace").split()), response.status)
    async for event in response.events():
        if event.strip() == "[DONE]":
            reading.is_done = True
            break
        reading.take(json.loads(event))
    if not reading.is_done and reading.finish_reason is None:
        raise HttpError("the stream ended without a finish reason")
    if not reading.chunks:
        raise HttpError("answered without a single token")


@dataclass(slots=True)
class _Chunk:
    at_s: float
    characters: int
    exact: int | None
    """Tokens by ids or logprobs."""
    grown: int | None
    """Completion tokens so far, when usage comes with every chunk."""


class _Reading:
    """A stream while it is read."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.chunks: list[_Chunk] = []
        self.usage: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.is_done = False
        self._text: list[str] = []
        self._ids: list[int] = []
        self._exact_by: CountedBy | None = None

    def take(self, event: dict[str, Any]) -> None:
        at_s = self._clock()
        if "error" in event:
            message = event["error"].get("message", event["error"]) if isinstance(event["error"], dict) else event["error"]
            raise HttpError(f"error in the stream: {str(message)[:300]}")
        usage = event.get("usage")
        self.usage = usage or self.usage
        for choice in event.get("choices") or ():
            self._take_choice(choice, at_s, usage)

    def _take_choice(self, choice: dict[str, Any], at_s: float, usage: dict[str, Any] | None) -> None:
        delta = choice.get("delta") or {}
        text = "".join(
            str(part) for part in (choice.get("text"), delta.get("reasoning_content"), delta.get("reasoning"), delta.get("content")) if part
        )
        calls = "".join(
            str((call.get("function") or {}).get(key) or "") for call in delta.get("tool_calls") or () for key in ("name", "arguments")
        )
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        exact: int | None = None
        if ids is not None:
            exact, self._exact_by = len(ids), "token_ids"
            self._ids += ids
        elif logprobs:
            exact, self._exact_by = len(logprobs.get("content") or logprobs.get("tokens") or ()), "logprobs"
        grown = usage.get("completion_tokens") if usage else None
        before = next((c.grown for c in reversed(self.chunks) if c.grown is not None), 0) or 0
        if text or calls or exact or (grown is not None and grown > before):
            self.chunks.append(_Chunk(at_s, len(text) + len(calls), exact, grown))
            self._text.append(text)

    def record(self, sent_s: float, ended_s: float, error: str | None, label: str) -> Record:
        counts, counted_by = self._count()
        arrivals = tuple(Arrival(c.at_s, n) for c, n in zip(self.chunks, counts) if n > 0)
        details = self.usage.get("prompt_tokens_details") or {}
        return Record(
            sent_s=sent_s,
            ended_s=ended_s,
            arrivals=arrivals,
            prompt_tokens=self.usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens", self.usage.get("prompt_cache_hit_tokens")),
            counted_by=counted_by,
            finish_reason=self.finish_reason,
            error=error,
            text="".join(self._text),
            token_ids=tuple(self._ids) if self._exact_by == "token_ids" else None,
            label=label,
        )

    def _count(self) -> tuple[list[int], CountedBy]:
        chunks = self.chunks
        total = self.usage.get("completion_tokens")
        if self._exact_by is not None:
            counts = [c.exact or 0 for c in chunks]
            # Logprobs may be missing where text was held back; the total then decides whether they can be trusted.
            if self._exact_by == "token_ids" or total is None or sum(counts) == total:
                return counts, self._exact_by
        grown = [c.grown for c in chunks if c.grown is not None]
        if chunks and len(grown) == len(chunks) and (total is None or grown[-1] == total):
            return [now - before for before, now in zip([0, *grown], grown)], "continuous_usage"
        if total is not None:
            return share_out(total, [c.characters for c in chunks]), "usage"
        return [1] * len(chunks), "chunks"


def share_out(total: int, weights: list[int]) -> list[int]:
    """Whole numbers that sum to `total`, in proportion to the weights; every chunk gets at least one while there are enough."""
    count, whole = len(weights), sum(weights) or 1
    if total < count:
        return [int(i < total) for i in range(count)]
    shares, given, seen = [], 0, 0
    for i, weight in enumerate(weights):
        seen += weight
        left = count - 1 - i
        upto = total if left == 0 else max(given + 1, min(total - left, round(total * seen / whole)))
        shares.append(upto - given)
        given = upto
    return shares
