# SPDX-License-Identifier: Apache-2.0
"""Conversations to prompts, and generated text back to answers: our thin interface over the deepseek-recipe codec.

`codec_for(chat_format, tokenizer)` gives a `ChatCodec`. It turns a body of any of the three chat protocols into a `ChatPrompt`: token ids,
and whether the prompt opened a thinking block. The prompt hands out one parser per answer, so rendering and parsing never disagree about
thinking. Knows neither engine nor HTTP. Special tokens come from template positions only: text that merely spells one stays text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import deepseek_recipe as recipe

from whalefall.core.errors import RequestError
from whalefall.core.structure import StructuredSpec
from whalefall.text.check import ROLES, check_messages
from whalefall.text.conversion import Converted, Converter, MakeGenerator
from whalefall.text.parser import Delta, Dialect, EventParser, OutputParser, ToolCallDelta
from whalefall.text.tool_grammar import CallFormat, ToolRule, tool_spec

__all__ = [
    "ROLES",
    "ChatCodec",
    "ChatFormat",
    "ChatPrompt",
    "DeepseekCodec",
    "Delta",
    "EventParser",
    "OutputParser",
    "PlainCodec",
    "ToolCallDelta",
    "check_messages",
    "codec_for",
]

ChatFormat = Literal["deepseek_v4", "deepseek_v41", "none"]

_ENCODINGS: dict[str, Any] = {"deepseek_v4": recipe.DeepseekV4Encoding, "deepseek_v41": recipe.DeepseekV41Encoding}


class TextEncoder(Protocol):
    """The one thing a codec asks of a tokenizer (`text.tokenizer.Tokenizer` has it)."""

    def encode(self, text: str, *, add_bos: bool, allow_special: bool) -> list[int]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompt:
    """A rendered conversation and how to read the answer to it."""

    text: str
    token_ids: list[int]
    is_thinking: bool
    """Whether the answer begins inside a thinking block that the prompt opened."""
    request: recipe.ConversationRequest
    options: recipe.ParsingOptions
    tool_rule: ToolRule | None = None
    """Which tool calls may or must come; None where no tools are offered."""
    call_format: CallFormat = "deepseek_v41"
    make_generator: MakeGenerator = recipe.ChatCompletionRequest.chunk_generator
    """Of the events of the protocol that was asked."""
    dialect: Callable[[], Dialect] | None = None
    """For a family that writes reasoning and calls otherwise than DeepSeek."""

    def structure(self, content: StructuredSpec | None, think_end_id: int | None) -> StructuredSpec | None:
        """The shape the answer must have, from the end of its reasoning on.

        Args:
            content: what an answer that is no tool call must match; None: anything.
            think_end_id: the token that ends a reasoning.
        """
        rule, spec = self.tool_rule, content
        if rule is not None and (rule.must_call or content is not None or any(tool.is_strict for tool in rule.tools)):
            spec = tool_spec(rule, self.call_format, content)
        if spec is None or not self.is_thinking:
            return spec
        if think_end_id is None:
            text = "this model's vocabulary has no token for the end of the reasoning: switch thinking off"
            raise RequestError(f"{spec.param}: {text}", param=spec.param)
        return replace(spec, after_token_id=think_end_id)

    def parser(self) -> OutputParser:
        """A fresh parser for one chat answer."""
        return OutputParser(self.request, self.options, self.dialect() if self.dialect else None)

    def event_parser(self, answer_id: str, model: str) -> EventParser:
        """A fresh parser for one answer in the events of the protocol that was asked."""
        return EventParser(self.make_generator(self.request, answer_id, model), self.options, self.dialect() if self.dialect else None)

    def default_max_tokens(self, context_limit: int) -> int:
        """Tokens to generate when the client names no limit: the protocol's default, within what the context leaves."""
        if len(self.token_ids) >= context_limit:
            return 1
        return int(self.request.resolve_max_tokens(len(self.token_ids), context_limit))


class ChatCodec(Protocol):
    """All three raise RequestError for a malformed conversation; `param` names the place."""

    def encode(self, body: Mapping[str, Any], stop: Sequence[str] = ()) -> ChatPrompt:
        """Render the conversation in a chat completions body and encode it.

        Reads messages, tools, tool_choice, parallel_tool_calls, response_format, thinking, reasoning_effort, continue_final_message and
        chat_template_kwargs.thinking; ignores everything else.
        """
        ...

    def encode_responses(self, body: Mapping[str, Any], response_format: Any = None) -> ChatPrompt:
        """The same for a Responses body; `response_format` is its text.format in the words of chat completions."""
        ...

    def encode_messages(self, body: Mapping[str, Any], response_format: Any = None, stop: Sequence[str] = ()) -> ChatPrompt:
        """The same for a Messages body."""
        ...


def codec_for(chat_format: ChatFormat, tokenizer: TextEncoder) -> ChatCodec:
    """The codec of a `ModelDefinition.chat_format`; a family without one has its checkpoint's chat template, if there is any."""
    if chat_format != "none":
        return DeepseekCodec(chat_format, tokenizer)
    if getattr(tokenizer, "chat_template", None) is None:
        return PlainCodec(tokenizer)
    from whalefall.text.chat_template import TemplateCodec  # builds on this module, and few need it

    return TemplateCodec(tokenizer)


class Codec:
    """Three bodies, one way to a prompt."""

    def __init__(self, tokenizer: TextEncoder, call_format: CallFormat, *, thinks_by_default: bool) -> None:
        self._tokenizer = tokenizer
        self._call_format: CallFormat = call_format
        self._converter = Converter(call_format, thinks_by_default=thinks_by_default)

    def encode(self, body: Mapping[str, Any], stop: Sequence[str] = ()) -> ChatPrompt:
        return self._prompt(self._converter.chat(body), stop, body)

    def encode_responses(self, body: Mapping[str, Any], response_format: Any = None) -> ChatPrompt:
        return self._prompt(self._converter.responses(body, response_format), (), body)

    def encode_messages(self, body: Mapping[str, Any], response_format: Any = None, stop: Sequence[str] = ()) -> ChatPrompt:
        return self._prompt(self._converter.messages(body, response_format), stop, body)

    def _prompt(self, converted: Converted, stop: Sequence[str], body: Mapping[str, Any]) -> ChatPrompt:
        options = converted.options
        options.stop_sequences = list(stop)
        text, token_ids = self._render(converted.conversation, body)
        stage = options.thinking_initial_stage
        return ChatPrompt(
            text=text,
            token_ids=token_ids,
            is_thinking=stage is not None and stage.starts_in_reasoning(),
            request=converted.request,
            options=options,
            tool_rule=converted.tool_rule,
            call_format=self._call_format,
            make_generator=converted.make_generator,
        )

    def _render(self, conversation: recipe.Conversation, body: Mapping[str, Any]) -> tuple[str, list[int]]:
        raise AssertionError("a codec renders")


class DeepseekCodec(Codec):
    """The protocol of DeepSeek-V4 and V4.1. Thinking is on unless the request, or else the tokenizer's own config, says otherwise."""

    def __init__(self, chat_format: CallFormat, tokenizer: TextEncoder) -> None:
        super().__init__(tokenizer, chat_format, thinks_by_default=getattr(tokenizer, "thinks_by_default", True))
        self._encoding = _ENCODINGS[chat_format]()

    def _render(self, conversation: recipe.Conversation, body: Mapping[str, Any]) -> tuple[str, list[int]]:
        rendered = self._encoding.render_conversation(conversation)
        return rendered.prompt, self._encode_ranges(rendered.prompt, rendered.special_ranges)

    def _encode_ranges(self, prompt: str, special_ranges: Sequence[tuple[int, int]]) -> list[int]:
        """Special spans become control tokens; what lies between is plain text, whatever it spells.

        A small vocabulary may lack some of the markers: such a marker is encoded as the text it is.
        """
        ids: list[int] = []
        done = 0
        for start, end in [*special_ranges, (len(prompt), len(prompt))]:
            if done < start:
                ids += self._tokenizer.encode(prompt[done:start], add_bos=False, allow_special=False)
            if start < end:
                ids += self._tokenizer.encode(prompt[start:end], add_bos=False, allow_special=True)
            done = end
        return ids


class PlainCodec(Codec):
    """For models without a chat protocol: `role: text` lines, then `assistant:`. No reasoning, no tools.

    system: Be brief.
    user: Hi
    assistant:
    """

    def __init__(self, tokenizer: TextEncoder) -> None:
        super().__init__(tokenizer, "deepseek_v41", thinks_by_default=False)

    def _prompt(self, converted: Converted, stop: Sequence[str], body: Mapping[str, Any]) -> ChatPrompt:
        if converted.tool_rule is not None and converted.tool_rule.must_call:
            raise RequestError("tool_choice demands a call, but this model has no way to call tools", param="tool_choice")
        options = converted.options
        options.parse_tool_calls = options.starts_in_tool_calls = False
        # A continuation keeps leading newlines: this text has no protocol to strip.
        options.thinking_initial_stage = recipe.ThinkingInitialStage.ContentContinuation
        return replace(super()._prompt(converted, stop, body), tool_rule=None)

    def _render(self, conversation: recipe.Conversation, body: Mapping[str, Any]) -> tuple[str, list[int]]:
        text = "".join(f"{message.role}: {message.content}\n" for message in conversation.messages) + "assistant:"
        return text, self._tokenizer.encode(text, add_bos=True, allow_special=False)
