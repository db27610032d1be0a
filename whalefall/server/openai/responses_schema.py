# SPDX-License-Identifier: Apache-2.0
"""What a client may send to /v1/responses. The conversation (input, instructions, tools, reasoning) is the chat codec's to check.

Beside the protocol's own fields those of `GenerationRequest` work: seed, top_k, min_p, penalties, structured output, cache_salt.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from whalefall.core.structure import StructuredSpec
from whalefall.server.openai.schema import GenerationRequest, refuse
from whalefall.server.openai.structure import one_rule, read_flat_format

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log-probabilities."""
MAX_METADATA = 16


class TextOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    format: Any = None
    """text, json_object, or json_schema with a schema beside it."""
    verbosity: str | None = None


class ResponsesRequest(GenerationRequest):
    input: Any = None
    instructions: Any = None
    tools: Any = None
    tool_choice: Any = None
    reasoning: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    store: bool | None = None
    """Keep the answer for GET and previous_response_id; true unless said otherwise."""
    background: bool | None = None
    """Answer at once with an id; the answer itself is asked for later."""
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    conversation: Any = None
    prompt: Any = None

    @model_validator(mode="after")
    def _check_responses(self) -> ResponsesRequest:
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            refuse("max_output_tokens", f"max_output_tokens must be at least 1, got {self.max_output_tokens}")
        if self.max_tokens is not None:
            refuse("max_tokens", "max_tokens is called max_output_tokens in this protocol")
        if self.n not in (None, 1):
            refuse("n", f"n must be 1 in this protocol, got {self.n}")
        if self.stop:
            refuse("stop", "stop has no place in this protocol; use /v1/chat/completions")
        if self.prompt_logprobs is not None:
            refuse("prompt_logprobs", "prompt_logprobs has no place in this protocol; use /v1/completions")
        if self.background and self.store is False:
            refuse("background", "background needs store: the answer is fetched from there")
        for name, instead in (("conversation", "use previous_response_id"), ("prompt", "send the text as input")):
            if getattr(self, name) is not None:
                refuse(name, f"{name} is not supported by this server; {instead}")
        if self.truncation not in (None, "disabled"):
            refuse("truncation", f"truncation must be disabled, got {self.truncation!r}: nothing is left out of a conversation in silence")
        if self.metadata is not None and len(self.metadata) > MAX_METADATA:
            refuse("metadata", f"metadata may hold up to {MAX_METADATA} entries, got {len(self.metadata)}")
        return self

    @property
    def num_top(self) -> int | None:
        """Alternatives for each content token; None: no log-probabilities."""
        wanted = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None

    @property
    def keeps(self) -> bool:
        return self.store is not False

    @property
    def formatted(self) -> tuple[StructuredSpec | None, Any]:
        """The rule for the answer, and how to tell the model of it (a `response_format`)."""
        flat, told = read_flat_format(self.text.format if self.text else None, "text.format")
        return one_rule(self.structure, flat), told or self.response_format
