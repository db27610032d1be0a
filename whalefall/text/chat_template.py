# SPDX-License-Identifier: Apache-2.0
"""Chats of families without a protocol of their own: the checkpoint's Jinja template writes the prompt, named parsers read the answer.

The template runs in Jinja's sandbox. Text of the conversation that spells a control token is marked before rendering and stays text in the
ids, whatever the template does with it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast

import deepseek_recipe as recipe
import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from whalefall.core.errors import ConfigError, RequestError
from whalefall.text.chat import ChatPrompt, Codec, TextEncoder
from whalefall.text.conversion import Converted
from whalefall.text.dialects import Chained, HermesDialect, ThinkDialect, choose_parsers
from whalefall.text.parser import Dialect

_MARK = "\ue000"
_MARKED = re.compile(f"{_MARK}([0-9]+);")


class TemplateCodec(Codec):
    def __init__(self, tokenizer: TextEncoder) -> None:
        """
        Raises:
            ConfigError: the template has a fault, or a named parser does not exist.
        """
        super().__init__(tokenizer, "deepseek_v41", thinks_by_default=getattr(tokenizer, "thinks_by_default", True))
        known: Any = tokenizer
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=time.strftime)
        try:
            self._template = environment.from_string(known.chat_template)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template has a fault in line {error.lineno}: {error.message}") from error
        self._reasoning_parser, self._tool_parser = choose_parsers(known.chat_template, known.parsers)
        self._names = {name: self._spelled(getattr(known, f"{name}_id")) for name in ("bos_token", "eos_token", "pad_token")}
        self._control = [_MARK, *sorted((self._spelled(i) for i in known.control_ids), key=len, reverse=True)]
        self._control_pattern = re.compile("|".join(map(re.escape, self._control)))

    def _spelled(self, token_id: int | None) -> str:
        return "" if token_id is None else cast(Any, self._tokenizer).token_text(token_id)

    def _prompt(self, converted: Converted, stop: Sequence[str], body: Mapping[str, Any]) -> ChatPrompt:
        rule, options = converted.tool_rule, converted.options
        if rule is not None and (rule.must_call or any(tool.is_strict for tool in rule.tools)):
            text = "a forced call and strict tools need a grammar, which there is none of for this model's way to write calls"
            raise RequestError(f"tool_choice: {text}", param="tool_choice")
        options.parse_tool_calls = rule is not None and self._tool_parser != "none"
        options.starts_in_tool_calls = False
        prompt = super()._prompt(converted, stop, body)
        is_opened = prompt.text.rstrip().endswith("<think>")
        reads_thinking = self._reasoning_parser == "think" and not converted.conversation.messages[-1].prefix
        stage = recipe.ThinkingInitialStage
        options.thinking_initial_stage = stage.ReasoningStart if reads_thinking else stage.ContentContinuation
        reads_calls = bool(options.parse_tool_calls)

        def dialect() -> Dialect:
            thinking = [ThinkDialect(is_opened=is_opened)] if reads_thinking else []
            return Chained(*thinking, *([HermesDialect()] if reads_calls else []))

        return replace(prompt, is_thinking=reads_thinking and is_opened, tool_rule=None, dialect=dialect)

    def _render(self, conversation: recipe.Conversation, body: Mapping[str, Any]) -> tuple[str, list[int]]:
        messages = [_message(message) for message in conversation.messages]
        is_continued = conversation.messages[-1].prefix
        tools = [_tool(tool) for tool in conversation.tools]
        kwargs = body.get("chat_template_kwargs") or {}
        given = {**kwargs, **self._names, "messages": self._shield(messages), "tools": self._shield(tools) or None}
        given.setdefault("enable_thinking", conversation.thinking_mode)
        given.setdefault("thinking", conversation.thinking_mode)
        try:
            text = self._template.render(**given, add_generation_prompt=not is_continued)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise RequestError(f"messages: the model's chat template refuses this conversation: {error}", param="messages") from error
        if is_continued:
            text = _cut_behind(text, self._shield(conversation.messages[-1].content))
        return self._encode_marked(text)

    def _shield(self, value: Any) -> Any:
        """Every control token that a text spells becomes a mark."""
        if isinstance(value, str):
            return self._control_pattern.sub(lambda found: f"{_MARK}{self._control.index(found.group())};", value)
        if isinstance(value, list):
            return [self._shield(item) for item in value]
        if isinstance(value, dict):
            return {key: self._shield(item) for key, item in value.items()}
        return value

    def _encode_marked(self, text: str) -> tuple[str, list[int]]:
        """The template's own control tokens count, the marked ones are text again."""
        ids: list[int] = []
        spelled = ""
        for place, part in enumerate(_MARKED.split(text)):
            piece = self._control[int(part)] if place % 2 else part
            spelled += piece
            if piece:
                ids += self._tokenizer.encode(piece, add_bos=False, allow_special=place % 2 == 0)
        return spelled, ids


def _message(message: recipe.Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning_content:
        made["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    return made


def _arguments(text: str) -> Any:
    """Templates write arguments out themselves, from an object."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _tool(tool: recipe.ToolDefinition) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters}}


def _cut_behind(text: str, content: str) -> str:
    place = text.rfind(content.strip())
    return text[: place + len(content.strip())] if place >= 0 else text


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
