# SPDX-License-Identifier: Apache-2.0
"""ResponsesWriter: what the codec's Responses events lack: sequence numbers after merging, the engine's counts, the client's own settings,
log-probabilities, and the ends that only a server knows (cancelled, shut down, failed).
"""

from __future__ import annotations

import time
from typing import Any

from whalefall.server.events import EventRun
from whalefall.server.openai.responses_schema import ResponsesRequest

_ENDS = ("response.completed", "response.incomplete", "response.failed")


class ResponsesWriter:
    def __init__(self, ask: ResponsesRequest, run: EventRun, created_s: int) -> None:
        self._run = run
        self._next = 0
        self._logprobs: dict[str, list[dict[str, Any]]] = {}
        """Of each message item so far."""
        self._last: dict[str, Any] = {}
        """The response object as last sent."""
        self._settings = {
            "created_at": created_s,
            "background": bool(ask.background),
            "store": ask.keeps,
            "previous_response_id": ask.previous_response_id,
            "metadata": ask.metadata or {},
            "parallel_tool_calls": ask.parallel_tool_calls is not False,
            "max_tool_calls": ask.max_tool_calls,
            "presence_penalty": ask.presence_penalty or 0.0,
            "frequency_penalty": ask.frequency_penalty or 0.0,
            "prompt_cache_key": ask.prompt_cache_key,
            "safety_identifier": ask.safety_identifier,
        }

    def write(self, event: dict[str, Any], *, is_cancelled: bool = False) -> dict[str, Any]:
        """Complete one event in place."""
        if "response" in event:
            self._settle(event, is_cancelled)
        elif self._run.entries or self._logprobs:
            self._add_logprobs(event)
        event["sequence_number"] = self._next
        self._next += 1
        return event

    def failure(self, error: dict[str, Any]) -> list[dict[str, Any]]:
        """The two events after a fault."""
        code = error.get("code") or "server_error"
        plain = {"type": "error", "code": code, "message": error["message"], "param": error.get("param")}
        response = {**self._blank(), "status": "failed", "error": {"code": "server_error", "message": error["message"]}}
        failed = {"type": "response.failed", "response": response}
        return [self.write(plain), self.write(failed)]

    def _blank(self) -> dict[str, Any]:
        return self._last or {"id": self._run.id, "object": "response", "output": []}

    def _settle(self, event: dict[str, Any], is_cancelled: bool) -> None:
        response = event["response"]
        response |= self._settings
        if event["type"] in _ENDS:
            response["usage"] = self._usage()
            self._settle_end(event, response, is_cancelled)
            for item in response["output"]:
                if item["id"] in self._logprobs:
                    item["content"][0]["logprobs"] = self._logprobs[item["id"]]
        self._last = response

    def _settle_end(self, event: dict[str, Any], response: dict[str, Any], is_cancelled: bool) -> None:
        if is_cancelled and self._run.finish_reason == "abort":
            event["type"] = "response.incomplete"  # the protocol has no event of its own for it
            response |= {"status": "cancelled", "incomplete_details": None}
        elif self._run.finish_reason == "abort":
            event["type"] = "response.failed"
            text = "the server ended this answer before it was complete"
            response |= {"status": "failed", "incomplete_details": None, "error": {"code": "server_error", "message": text}}
        response["completed_at"] = int(time.time()) if response["status"] == "completed" else None

    def _usage(self) -> dict[str, Any]:
        usage = self._run.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _add_logprobs(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "response.output_text.delta":
            event["logprobs"], self._run.entries = self._run.entries, []
            self._logprobs.setdefault(event["item_id"], []).extend(event["logprobs"])
        elif kind == "response.output_text.done":
            event["logprobs"] = self._logprobs.get(event["item_id"], [])
        elif kind == "response.content_part.done" and event["part"]["type"] == "output_text":
            event["part"]["logprobs"] = self._logprobs.get(event["item_id"], [])
        elif kind == "response.output_item.done" and event["item"]["type"] == "message":
            event["item"]["content"][0]["logprobs"] = self._logprobs.get(event["item"]["id"], [])
        elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            self._run.entries = []  # of the markup
