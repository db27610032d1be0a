# SPDX-License-Identifier: Apache-2.0
"""What a client may send to /v1/messages and /v1/messages/count_tokens.

The conversation itself (messages, system, tools, tool_choice, thinking, output_config.effort) is checked by the chat codec. Beside the
protocol's own fields those of `GenerationRequest` work: seed, min_p, penalties, structured output and the rest.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from whalefall.core.structure import StructuredSpec
from whalefall.server.openai.schema import MAX_STOPS, GenerationRequest, refuse
from whalefall.server.openai.structure import one_rule, read_flat_format


class OutputConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    format: Any = None
    """json_schema: the answer's text obeys it."""
    effort: Any = None


class MessagesRequest(GenerationRequest):
    messages: Any = None
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None
    stop_sequences: list[str] | None = None
    output_config: OutputConfig | None = None
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None

    @field_validator("stop_sequences")
    @classmethod
    def _check_stops(cls, value: list[str] | None) -> list[str] | None:
        if value and len(value) > MAX_STOPS:
            raise ValueError(f"stop_sequences may hold up to {MAX_STOPS} strings, got {len(value)}")
        if value and not all(value):
            raise ValueError("stop_sequences must not hold an empty string")
        return value

    @model_validator(mode="after")
    def _check_messages(self) -> MessagesRequest:
        if self.max_tokens is not None and self.max_tokens < 1:
            refuse("max_tokens", f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.stop:
            refuse("stop", "stop is called stop_sequences in this protocol")
        if self.n not in (None, 1):
            refuse("n", f"n must be 1 in this protocol, got {self.n}")
        if self.prompt_logprobs is not None:
            refuse("prompt_logprobs", "prompt_logprobs has no place in this protocol; use /v1/completions")
        for name in ("container", "mcp_servers", "context_management"):
            if getattr(self, name):
                refuse(name, f"{name} is not supported by this server")
        return self

    @property
    def formatted(self) -> tuple[StructuredSpec | None, Any]:
        """The rule for the answer, and how to tell the model of it (a `response_format`)."""
        flat, told = read_flat_format(self.output_config.format if self.output_config else None, "output_config.format")
        return one_rule(self.structure, flat), told or self.response_format
