# SPDX-License-Identifier: Apache-2.0
"""What both endpoints do with engine outputs: usage, the outer object of an answer, and the fault check."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.responses import Response

from whalefall.core.errors import RequestError
from whalefall.core.sampling import SamplingParams
from whalefall.observe.log import RequestLog, get_logger
from whalefall.server.door import Door, Engine
from whalefall.server.errors import GenerationFailed

log = get_logger(__name__)
_PARSER_MARKERS = ("<think>", "</think>", "｜DSML｜")
"""Tokens that the parser must see, whether the vocabulary calls them special or not."""
_TURN_MARKERS = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
)
"""Never part of an answer, even where the vocabulary does not call them special."""


@dataclass(slots=True)
class Usage:
    """Token counts of one request: the prompt once, however many answers it gets."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    """Only chat answers have reasoning."""

    def json(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            # The same in the flat fields of DeepSeek's own API.
            "prompt_cache_hit_tokens": self.cached_tokens,
            "prompt_cache_miss_tokens": self.prompt_tokens - self.cached_tokens,
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


@dataclass(slots=True)
class Envelope:
    """The fields that every chunk of one answer repeats."""

    door: Door
    prefix: str
    kind: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    _opening: bytes = b""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    def around(self, choices: list[dict[str, Any]], usage: Usage | None, **more: Any) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.door.model_name,
            "choices": choices,
            **more,
        }
        if usage is not None:
            body["usage"] = usage.json()
        return body

    def event(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        """The same as one server-sent event. What every chunk repeats is written out once."""
        if not self._opening:
            fields = {"id": self.id, "object": self.kind, "created": self.created, "model": self.door.model_name}
            self._opening = b"data: " + orjson.dumps(fields)[:-1] + b',"choices":'
        closing = b"}\n\n" if usage is None else b',"usage":' + orjson.dumps(usage.json()) + b"}\n\n"
        return self._opening + orjson.dumps(choices) + closing

    def log_end(self, usage: Usage, reasons: list[str | None]) -> None:
        """One line per request, at its end."""
        if self.door.config.log_requests:
            ends = ", ".join(reason or "left open" for reason in reasons)
            line = RequestLog(log, self.id)
            line.info("%d prompt tokens, %d answer tokens, ended by %s", usage.prompt_tokens, usage.completion_tokens, ends)


def respond(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


def check_fault(output: Any) -> None:
    """Raises when the engine ended a choice with a fault. None is no output yet."""
    for choice in output.outputs if output is not None else ():
        if choice.finish_reason == "error":
            reason = getattr(output, "error", None) or choice.stop_reason
            raise GenerationFailed(f"the engine failed on this request: {reason}" if reason else "the engine failed on this request")


def hidden_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that chat answers leave out: control tokens other than those the parser must see."""
    seen, turns = ({tokenizer.token_to_id(marker) for marker in markers} for markers in (_PARSER_MARKERS, _TURN_MARKERS))
    return frozenset((tokenizer.special_ids | turns) - seen - {None})


def validate(engine: Engine, token_ids: Sequence[int], sampling: SamplingParams, param: str) -> None:
    """The engine's own check; what it calls the prompt, the client wrote under `param`."""
    try:
        engine.validate(token_ids, sampling)
    except RequestError as error:
        if error.param == "prompt":
            error.param = param
        raise


def content_size(messages: Any) -> int:
    """At most the number of bytes of text in a list of messages, and 0 for anything malformed, which the codec will refuse."""
    if isinstance(messages, str):
        return len(messages)
    if not isinstance(messages, list):
        return 0
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part.get("text") for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return sum(len(text) for text in [*contents, *parts] if isinstance(text, str))
