# SPDX-License-Identifier: Apache-2.0
"""EventRun: one request of a protocol that answers in events (Responses, Messages): engine outputs in, JSON events out, a list a step.

The codec makes the events, token by token, so that counts end with the token that completes a stop string; what the tokens of one step say
to the same part becomes one event. What a protocol writes into its events beside that (numbers, usage, ids) is its own module's work.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import orjson

from whalefall.core.request import FinishReason
from whalefall.core.sampling import SamplingParams
from whalefall.observe.log import RequestLog, get_logger
from whalefall.server.door import Door, Engine
from whalefall.server.fan import Fan
from whalefall.server.openai.answer import Usage, check_fault, hidden_ids
from whalefall.server.openai.logprobs import chat_entry
from whalefall.text.chat import ChatPrompt

log = get_logger(__name__)
_GROWING = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
"""Deltas of the Messages protocol, and the field that holds their text."""


class EventRun:
    def __init__(
        self,
        door: Door,
        engine: Engine,
        prompt: ChatPrompt,
        sampling: SamplingParams,
        answer_id: str,
        cache_use: dict[str, Any],
        *,
        num_top: int | None = None,
    ) -> None:
        """
        Args:
            answer_id: of the answer and of its request in the engine.
            num_top: alternatives to give with each content token in `entries`; None: no log-probabilities.
        """
        self.id = answer_id
        self.usage = Usage(prompt_tokens=len(prompt.token_ids), reasoning_tokens=0)
        self.finish_reason: str | None = None
        """How the engine ended it; "stop" for a stop string too."""
        self.entries: list[dict[str, Any]] = []
        """Log-probabilities of content tokens that no event has taken yet."""
        self._door = door
        self._engine = engine
        self._num_top = num_top
        self._hidden = hidden_ids(engine.tokenizer)
        self._parser = prompt.event_parser(answer_id, door.model_name)
        self._fan = Fan([engine.generate(prompt.token_ids, sampling, answer_id, prompt=prompt.text, **cache_use)])

    async def begin(self) -> None:
        """Wait a moment for the engine's first word, so that a fault before it gets a real status code."""
        self._door.active.add(self.id)
        try:
            first = await self._fan.wait_first(self._door.config.first_token_wait_s)
            check_fault(first)
        except BaseException:
            await self.close()
            raise
        self.usage.cached_tokens = 0 if first is None else first.num_cached_tokens

    async def steps(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The events of each step; first of all those that open the answer."""
        yield self._parser.begin()
        async for _, output in self._fan.items():
            check_fault(output)
            self.usage.cached_tokens = output.num_cached_tokens
            for moved in output.outputs:
                if self.finish_reason is not None:
                    continue  # the engine had run on behind a stop string
                events = self._feed(moved)
                if self.finish_reason is not None and moved.finish_reason is None:
                    await self._engine.abort(self.id, choice=0, reason=FinishReason.STOP)
                if events:
                    yield merge(events)

    async def stop(self) -> None:
        """End the answer in the engine; `steps` then ends by itself, with finish reason "abort"."""
        await self._engine.abort(self.id)

    async def close(self) -> None:
        await self._fan.aclose()
        if self.id in self._door.active and self._door.config.log_requests:
            line = RequestLog(log, self.id)
            ends = self.finish_reason or "left open"
            line.info("%d prompt tokens, %d answer tokens, ended by %s", self.usage.prompt_tokens, self.usage.completion_tokens, ends)
        self._door.active.discard(self.id)

    def _feed(self, output: Any) -> list[dict[str, Any]]:
        parser, events = self._parser, []
        for place, token_id in enumerate(output.token_ids):
            events += self._take(token_id, output.token_texts[place], output.logprobs[place] if output.logprobs else None)
            if parser.has_stopped:
                break
        if parser.has_stopped:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            # An end without a token (abort) may still bring text that the engine had held back.
            for text in output.token_texts[len(output.token_ids) :]:
                events += parser.push(text)
            self.finish_reason = str(output.finish_reason)
            events += parser.finish("stop" if self.finish_reason == "stop" else "length")
        return events

    def _take(self, token_id: int, text: str, alternatives: Any) -> list[dict[str, Any]]:
        self.usage.completion_tokens += 1
        was_reasoning = self._parser.is_reasoning
        if was_reasoning and self.usage.reasoning_tokens is not None:
            self.usage.reasoning_tokens += 1
        tokenizer = self._engine.tokenizer
        if token_id in self._hidden:
            text = text.removesuffix(tokenizer.token_text(token_id))
        events = self._parser.push(text)
        if self._num_top is not None and alternatives is not None and text and not was_reasoning:
            self.entries.append(chat_entry(tokenizer, token_id, alternatives, self._num_top))
        return events


def merge(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours that add text to the same part become one."""
    merged: list[dict[str, Any]] = []
    for event in events:
        if not merged or not _grow(merged[-1], event):
            merged.append(event)
    return merged


def _grow(last: dict[str, Any], event: dict[str, Any]) -> bool:
    kind = event["type"]
    if last["type"] != kind:
        return False
    if kind.endswith(".delta") and last["item_id"] == event["item_id"]:
        last["delta"] += event["delta"]
        return True
    if kind == "content_block_delta" and last["index"] == event["index"] and last["delta"]["type"] == event["delta"]["type"]:
        field = _GROWING.get(event["delta"]["type"])
        if field is not None:
            last["delta"][field] += event["delta"][field]
            return True
    return False


def named_event(event: dict[str, Any]) -> bytes:
    """As a server-sent event that carries its type as its name too."""
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
