# SPDX-License-Identifier: Apache-2.0
"""Generated text back to an answer: reasoning, content, tool calls, stop strings. Our thin interface over the deepseek-recipe parser.

`OutputParser` gives `Delta`s, which chat answers are made of; `EventParser` gives the events of the Responses and Messages protocols as
plain objects. Both are fed the text of one token at a time and say with which token the answer stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import deepseek_recipe as recipe

MODEL_NAME = "model"
"""What the codec calls the model; the door puts the served name into answers."""


_THINK_END = "</think>"
_LONGEST_LOOK = 2 * len(_THINK_END) + 256
"""A token is not longer than that: the marker is seen even where it lies across tokens."""


class Dialect(Protocol):
    """Another family's way of writing reasoning and calls, put into DeepSeek's markup while it streams (text/dialects.py)."""

    def push(self, text: str) -> str: ...
    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one tool call. id and name come once, with the first piece; arguments are fragments of a JSON object."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Delta:
    """What some more generated text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def add(self, other: Delta) -> None:
        """Append `other`; fragments of one tool call grow together."""
        self.content += other.content
        self.reasoning += other.reasoning
        for piece in other.tool_calls:
            last = self.tool_calls[-1] if self.tool_calls else None
            if last is not None and last.index == piece.index and piece.name is None:
                self.tool_calls[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + piece.arguments)
            else:
                self.tool_calls.append(piece)


class _Reader:
    """The part both parsers share: the stream processor, whether it is still reasoning, and which stop string ended it.

    Push the text of one token at a time: then `has_stopped` turns true with exactly the token that completes a stop string. Text that might
    begin a stop string or a marker waits; `finish` lets it go. A stop string is never part of the content.
    """

    def __init__(self, generator: Any, options: recipe.ParsingOptions, dialect: Dialect | None) -> None:
        self._processor = recipe.StreamProcessor(generator, options)
        self._dialect = dialect
        self._stops = list(options.stop_sequences)
        self._tail = ""
        self._end = ""
        stage = options.thinking_initial_stage
        self.is_reasoning = stage is not None and stage.starts_in_reasoning() and not options.starts_in_tool_calls
        """Whether everything so far belongs to the reasoning, whose end marker counts as part of it."""
        self.stop_string: str | None = None
        """The stop string that ended it."""

    @property
    def has_stopped(self) -> bool:
        return self._processor.finished

    def _push(self, text: str) -> list[Any]:
        if self._dialect is not None:
            text = self._dialect.push(text)
        if self.has_stopped or not text:
            return []
        chunks = self._processor.push(recipe.InferenceChunk.text(text, 1))
        if self.is_reasoning:
            self._end = (self._end + text)[-_LONGEST_LOOK:]
            self.is_reasoning = _THINK_END not in self._end
        if self._stops:
            self._remember(text)
        return chunks

    def _finish(self, reason: Literal["stop", "length"]) -> list[Any]:
        if self.has_stopped:
            return []
        rest = self._dialect.finish() if self._dialect is not None else ""
        chunks = self._processor.push(recipe.InferenceChunk.text(rest, 0)) if rest else []
        if self.has_stopped:
            return chunks
        chosen = recipe.InferenceFinishReason.Stop if reason == "stop" else recipe.InferenceFinishReason.Length
        return [*chunks, *self._processor.push(recipe.InferenceChunk.finish(chosen))]

    def _remember(self, text: str) -> None:
        """Find out which stop string matched: the one that was complete first, and of two that end together the longer."""
        self._tail = (self._tail + text).rpartition("</think>")[2]  # stop strings count in the content only
        if self.has_stopped:
            found = [(start + len(stop), start, stop) for stop in self._stops if (start := self._tail.find(stop)) >= 0]
            self.stop_string = min(found)[2] if found else None
        self._tail = self._tail[-max(map(len, self._stops)) :]


class OutputParser(_Reader):
    """Sorts the text of one answer into reasoning, content and tool calls, and watches for stop strings in the content."""

    def __init__(self, request: recipe.ConversationRequest, options: recipe.ParsingOptions, dialect: Dialect | None = None) -> None:
        super().__init__(recipe.ChatCompletionRequest.chunk_generator(request, "", MODEL_NAME), options, dialect)
        self._processor.push(recipe.InferenceChunk.ready())
        self.finish_reason: str | None = None
        """stop, length or tool_calls, once the answer has ended."""

    def push(self, text: str) -> Delta:
        """The text of one token -> what can be said now; nothing after the answer has stopped."""
        return self._take(self._push(text))

    def finish(self, reason: Literal["stop", "length"]) -> Delta:
        """The engine has ended: release what was held back and settle the finish reason."""
        return self._take(self._finish(reason))

    def _take(self, chunks: Sequence[Any]) -> Delta:
        delta = Delta()
        for chunk in chunks:
            choice = json.loads(chunk.to_json())["choices"][0]
            delta.add(_read_delta(choice["delta"]))
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        if delta.content or delta.tool_calls:
            self.is_reasoning = False
        return delta


class EventParser(_Reader):
    """The same text as events of the Responses or Messages protocol: JSON objects, as the codec makes them, one list for each token."""

    def __init__(self, generator: Any, options: recipe.ParsingOptions, dialect: Dialect | None = None) -> None:
        super().__init__(generator, options, dialect)

    def begin(self) -> list[dict[str, Any]]:
        """The events that open the answer. Their token counts are 0: the caller knows the right ones."""
        return self._take(self._processor.push(recipe.InferenceChunk.ready()))

    def push(self, text: str) -> list[dict[str, Any]]:
        """The text of one token -> the events that can be sent now; none after the answer has stopped."""
        return self._take(self._push(text))

    def finish(self, reason: Literal["stop", "length"]) -> list[dict[str, Any]]:
        """The engine has ended: the events that close the answer."""
        return self._take(self._finish(reason))

    def _take(self, chunks: Sequence[Any]) -> list[dict[str, Any]]:
        events = [json.loads(chunk.to_json()) for chunk in chunks]
        if any(_opens_answer(event) for event in events):
            self.is_reasoning = False
        return events


def _opens_answer(event: Mapping[str, Any]) -> bool:
    """Whether something other than reasoning begins."""
    if event["type"] == "response.output_item.added":
        return bool(event["item"]["type"] != "reasoning")
    return bool(event["type"] == "content_block_start" and event["content_block"]["type"] != "thinking")


def _read_delta(fields: Mapping[str, Any]) -> Delta:
    calls = [
        ToolCallDelta(call["index"], call.get("id"), call["function"].get("name"), call["function"].get("arguments") or "")
        for call in fields.get("tool_calls") or ()
    ]
    return Delta(fields.get("content") or "", fields.get("reasoning_content") or "", calls)
