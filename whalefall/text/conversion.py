# SPDX-License-Identifier: Apache-2.0
"""Request bodies of the three chat protocols to one `Converted`: a conversation, how to read the answer, which tool calls may come.

deepseek-recipe does the reading. Around it stands what a self-hosted server wants otherwise (docs/protocols.md): a forced call while
thinking, JSON answers without the word "json" in the prompt, tools on a system message, a prefilled assistant turn; and whatever the
library would drop in silence is refused or kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from whalefall.core.errors import RequestError
from whalefall.core.structure import close_objects
from whalefall.text.check import check_blocks, check_items, check_messages, short, template_thinking
from whalefall.text.parser import MODEL_NAME
from whalefall.text.tool_grammar import CallFormat, Tool, ToolRule, check_name, read_tools

_VERSIONS = {"deepseek_v4": recipe.ModelVersion.DeepseekV4Pro, "deepseek_v41": recipe.ModelVersion.DeepseekV41Flash}
_CHAT_FIELDS = ("messages", "tools", "thinking", "reasoning_effort", "tool_choice")
"""What the codec reads. tool_choice comes last: whether it is fine depends on the others."""
_RESPONSES_FIELDS = ("input", "instructions", "tools", "reasoning", "text", "tool_choice")
_MESSAGES_FIELDS = ("messages", "system", "tools", "thinking", "output_config", "tool_choice")
_WRONG_SHAPE = (ValueError, TypeError, OverflowError, RecursionError)
"""What the codec's deserialiser raises before its own checks begin."""

MakeGenerator = Callable[[recipe.ConversationRequest, str, str], Any]
"""(request, id, model name) -> the generator of the protocol's events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    conversation: recipe.Conversation
    request: recipe.ConversationRequest
    options: recipe.ParsingOptions
    tool_rule: ToolRule | None
    """Which tool calls may or must come; None where no tools are offered."""
    make_generator: MakeGenerator
    """Of the protocol's own events; chat has `OutputParser` instead."""


@dataclass(frozen=True, slots=True)
class _Protocol:
    """One protocol's class in the codec, the fields it reads, and a body that is fine without them."""

    kind: Any
    fields: tuple[str, ...]
    probe: Mapping[str, Any]


_CHAT = _Protocol(recipe.ChatCompletionRequest, _CHAT_FIELDS, {"messages": [{"role": "user", "content": "json"}]})
_RESPONSES = _Protocol(recipe.ResponsesRequest, _RESPONSES_FIELDS, {"input": "json"})
_MESSAGES = _Protocol(recipe.MessagesRequest, _MESSAGES_FIELDS, {"messages": [{"role": "user", "content": "json"}]})


class Converter:
    """Reads bodies for one version of the model. Thinking is on unless the request, or else `thinks_by_default`, says otherwise."""

    def __init__(self, call_format: CallFormat, *, thinks_by_default: bool) -> None:
        self._call_format = call_format
        self._thinks = thinks_by_default
        self._options = recipe.ConversionOptions().with_model_alias(MODEL_NAME, _VERSIONS[call_format])

    def chat(self, body: Mapping[str, Any]) -> Converted:
        fields = {name: body[name] for name in _CHAT_FIELDS if body.get(name) is not None}
        fields["messages"] = check_messages(body.get("messages"))
        _continue_final(fields["messages"], body)
        self._set_thinking(fields, body, has_effort="reasoning_effort" in fields)
        tools = read_tools(fields.get("tools"))
        system_tools = [read_tools(message.get("tools")) for message in fields["messages"] if message["role"] == "system"]
        if self._call_format == "deepseek_v4" and any(system_tools):
            # V4's encoding has no place for them: they stand with the others.
            extra = [tool for message in fields["messages"] if message["role"] == "system" for tool in message.get("tools") or ()]
            fields["tools"] = [*fields.get("tools", ()), *extra]
        request = self._convert_choice(_CHAT, fields)
        options = request.parsing_options
        conversation = request.conversation
        if conversation.messages[-1].prefix and options.thinking_initial_stage is None:
            options.thinking_initial_stage = recipe.ThinkingInitialStage.ContentContinuation  # keeps newlines at the seam
        if any(system_tools) and self._call_format != "deepseek_v4" and fields.get("tool_choice") != "none":
            conversation = _rebuilt(conversation, messages=_with_system_tools(conversation.messages, fields["messages"]))
            options.parse_tool_calls = True
        choice = fields.get("tool_choice")
        every = [*tools, *(tool for group in system_tools for tool in group)]
        rule = _tool_rule(() if choice == "none" else every, _forced(choice), body.get("parallel_tool_calls"), options)
        return Converted(
            conversation=_with_format(conversation, body.get("response_format")),
            request=request,
            options=options,
            tool_rule=rule,
            make_generator=recipe.ChatCompletionRequest.chunk_generator,
        )

    def responses(self, body: Mapping[str, Any], response_format: Any = None) -> Converted:
        """`response_format` is the body's text.format in the chat protocol's words."""
        fields = {name: body[name] for name in _RESPONSES_FIELDS if body.get(name) is not None and name != "text"}
        check_items(fields.get("input"))
        reasoning = fields.get("reasoning")
        effort = reasoning.get("effort") if isinstance(reasoning, Mapping) else None
        thinking = _thinking_switch(body)
        if effort is None and not isinstance(reasoning, list | str | int) and not (self._thinks if thinking is None else thinking):
            fields["reasoning"] = {**(reasoning or {}), "effort": "none"}
        _narrow_tools(fields)
        request = self._convert_choice(_RESPONSES, fields)
        asked = self._read(_RESPONSES, {**_echoed(body), **fields})
        echo, names = asked.echo(), asked.namespace_tool_map(self._options)

        def generator(converted: recipe.ConversationRequest, answer_id: str, model: str) -> Any:
            made = recipe.ResponsesRequest.chunk_generator(converted, answer_id, model).with_echo(echo)
            return made.with_namespace_tool_map(names) if names else made

        strict = {tool.get("name") for tool in fields.get("tools") or () if isinstance(tool, Mapping) and tool.get("strict") is True}
        return self._converted(request, fields, strict, body.get("parallel_tool_calls"), response_format, generator)

    def messages(self, body: Mapping[str, Any], response_format: Any = None) -> Converted:
        fields = {name: body[name] for name in _MESSAGES_FIELDS if body.get(name) is not None}
        fields["messages"] = check_blocks(body.get("messages"))
        self._set_thinking(fields, body, has_effort=False)
        request = self._convert_choice(_MESSAGES, fields)
        strict = {tool.get("name") for tool in fields.get("tools") or () if isinstance(tool, Mapping) and tool.get("strict") is True}
        choice = fields.get("tool_choice")
        is_single = isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use") is True
        make = recipe.MessagesRequest.chunk_generator
        converted = self._converted(request, fields, strict, False if is_single else None, response_format, make)
        return _continued(converted) if fields["messages"][-1]["role"] == "assistant" else converted

    def _converted(
        self,
        request: recipe.ConversationRequest,
        fields: Mapping[str, Any],
        strict: set[Any],
        parallel: Any,
        response_format: Any,
        make_generator: MakeGenerator,
    ) -> Converted:
        conversation, options = request.conversation, request.parsing_options
        _check_images(conversation)
        choice = fields.get("tool_choice")
        is_none = choice == "none" or (isinstance(choice, Mapping) and choice.get("type") == "none")
        tools = () if is_none else tuple(_tool(tool, tool.name in strict, i) for i, tool in enumerate(conversation.tools))
        return Converted(
            conversation=_with_format(conversation, response_format),
            request=request,
            options=options,
            tool_rule=_tool_rule(tools, _forced(choice), parallel, options),
            make_generator=make_generator,
        )

    def _set_thinking(self, fields: dict[str, Any], body: Mapping[str, Any], *, has_effort: bool) -> None:
        thinking = template_thinking(body.get("chat_template_kwargs"))
        if thinking is not None:
            fields.setdefault("thinking", {"type": "enabled" if thinking else "disabled"})
        if not self._thinks and not has_effort:
            fields.setdefault("thinking", {"type": "disabled"})

    def _convert_choice(self, protocol: _Protocol, fields: dict[str, Any]) -> recipe.ConversationRequest:
        """Convert; a forced tool call is allowed while thinking too.

        The codec opens the block of calls in the prompt, which leaves no room for reasoning, and so refuses it. Here the prompt of such a
        request is that of tool_choice auto, and `ChatPrompt.structure` sees to it that a call follows the reasoning.
        """
        if _forced(fields.get("tool_choice")) is None:
            return self._convert(protocol, fields)
        auto: Any = {"type": "auto"} if protocol is _MESSAGES else "auto"
        free = self._convert(protocol, {**fields, "tool_choice": auto})
        if not free.conversation.thinking_mode:
            return self._convert(protocol, fields)
        # The choice itself must be sound, which only shows where the codec does not think.
        quiet: dict[str, Any] = {"reasoning": {"effort": "none"}} if protocol is _RESPONSES else {"thinking": {"type": "disabled"}}
        left_out = ("reasoning_effort", "output_config")
        self._convert(protocol, {**{name: value for name, value in fields.items() if name not in left_out}, **quiet})
        return free

    def _convert(self, protocol: _Protocol, fields: Mapping[str, Any]) -> recipe.ConversationRequest:
        try:
            return protocol.kind({"model": MODEL_NAME, **fields}).convert(self._options)
        except recipe.ConversionError as error:
            message = json.loads(error.body)["error"]["message"]
        except _WRONG_SHAPE as error:
            message = str(error).removeprefix("invalid request body: ")
        param = self._blame(protocol, fields)
        raise RequestError(f"{param}: {message}", param=param)

    def _read(self, protocol: _Protocol, body: Mapping[str, Any]) -> Any:
        try:
            return protocol.kind({"model": MODEL_NAME, **body})
        except _WRONG_SHAPE as error:
            raise RequestError(f"body: {str(error).removeprefix('invalid request body: ')}") from error

    def _blame(self, protocol: _Protocol, fields: Mapping[str, Any]) -> str:
        """The codec's messages carry no field: put the fields under a good message one by one, the first refusal names the culprit."""
        probe: dict[str, Any] = {"model": MODEL_NAME, **protocol.probe}
        for name in protocol.fields[1:]:
            if name in fields:
                probe[name] = fields[name]
                try:
                    protocol.kind(probe).convert(self._options)
                except (recipe.ConversionError, *_WRONG_SHAPE):
                    return name
        return protocol.fields[0]


def _echoed(body: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a Responses answer reports as they were asked."""
    names = ("max_output_tokens", "temperature", "top_p", "top_logprobs", "user", "text", "tools", "tool_choice")
    return {name: body[name] for name in names if body.get(name) is not None}


def _thinking_switch(body: Mapping[str, Any]) -> bool | None:
    """Responses has no field for it but reasoning.effort; the two switches of the other protocols count here too."""
    chosen = body.get("thinking")
    if chosen is None:
        return template_thinking(body.get("chat_template_kwargs"))
    if not isinstance(chosen, Mapping) or chosen.get("type") not in ("enabled", "disabled"):
        raise RequestError(f'thinking must be {{"type": "enabled"}} or {{"type": "disabled"}}, got {short(chosen)}', param="thinking")
    return bool(chosen["type"] == "enabled")


def _continue_final(messages: list[dict[str, Any]], body: Mapping[str, Any]) -> None:
    """vLLM's continue_final_message says of the last message what DeepSeek's `prefix` says on it."""
    if body.get("continue_final_message") is True:
        if messages[-1]["role"] != "assistant":
            text = "continue_final_message needs a last message of role assistant"
            raise RequestError(text, param="continue_final_message")
        messages[-1]["prefix"] = True


def _narrow_tools(fields: dict[str, Any]) -> None:
    """tool_choice allowed_tools: only these tools are offered, and `mode` is the choice."""
    choice = fields.get("tool_choice")
    if not (isinstance(choice, Mapping) and choice.get("type") == "allowed_tools"):
        return
    mode, allowed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(allowed, list) or not all(isinstance(tool, Mapping) for tool in allowed):
        text = f"tool_choice must have a mode (auto or required) and a list of tools, got {short(choice)}"
        raise RequestError(text, param="tool_choice")
    names = [tool.get("name") for tool in allowed]
    given = fields.get("tools")
    offered = [tool for tool in given if isinstance(tool, Mapping)] if isinstance(given, list) else []
    missing = [name for name in names if name not in [tool.get("name") for tool in offered]]
    if missing:
        raise RequestError(f"tool_choice allows {short(missing[0])}, which is not among the tools", param="tool_choice")
    fields["tools"] = [tool for tool in offered if tool.get("name") in names]
    fields["tool_choice"] = mode


def _forced(choice: Any) -> str | None:
    """The tool that a choice demands; "" for any of them, None for none. In the words of all three protocols."""
    if choice == "required":
        return ""
    if not isinstance(choice, Mapping):
        return None
    if choice.get("type") == "any":
        return ""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    return name if isinstance(name, str) else None


def _tool(tool: recipe.ToolDefinition, is_strict: bool, index: int) -> Tool:
    parameters = tool.parameters if isinstance(tool.parameters, Mapping) else {}
    check_name(tool.name, f"tools[{index}].name")
    return Tool(tool.name, close_objects(parameters) if is_strict else parameters, is_strict, f"tools[{index}]")


def _tool_rule(tools: Sequence[Tool], forced: str | None, parallel: Any, options: recipe.ParsingOptions) -> ToolRule | None:
    """A named choice means one call of that tool. So does `required` one call, unless parallel_tool_calls is true in so many words."""
    if forced:
        # A tool in a namespace is named without it.
        tools = [tool for tool in tools if tool.name in (forced, tool.name.partition("::")[0] + "::" + forced)]
    if not tools and forced is not None:
        raise RequestError("tool_choice demands a call, but there are no tools to call", param="tool_choice")
    if not tools:
        return None
    is_one = parallel is False or bool(forced) or (forced is not None and parallel is not True)
    is_opened = options.starts_in_tool_calls
    return ToolRule(tools=tuple(tools), must_call=forced is not None, is_opened=is_opened, one_call=is_one)


def _check_images(conversation: recipe.Conversation) -> None:
    if any(message.image_sources for message in conversation.messages):
        raise RequestError("image input is not supported by this server yet", param="messages")


def _rebuilt(conversation: recipe.Conversation, **changes: Any) -> recipe.Conversation:
    given: dict[str, Any] = {
        "messages": conversation.messages,
        "thinking_mode": conversation.thinking_mode,
        "tools": conversation.tools,
        "tool_choice": conversation.tool_choice,
        "reasoning_effort": conversation.reasoning_effort,
        **changes,
    }
    return recipe.Conversation(given.pop("messages"), **given)


def _with_system_tools(messages: Sequence[recipe.Message], asked: Sequence[Mapping[str, Any]]) -> list[recipe.Message]:
    """Tools on a system message, which the chat conversion leaves out though the encoding has a place for them."""
    groups = iter([message.get("tools") or () for message in asked if message["role"] == "system"])
    made: list[recipe.Message] = []
    for message in messages:
        if message.role != "system":
            made.append(message)
            continue
        functions = [tool["function"] for tool in next(groups, ())]
        tools = [recipe.ToolDefinition(f["name"], f.get("description"), f.get("parameters") or {}, f.get("strict")) for f in functions]
        made.append(recipe.SystemMessage(message.content, message.image_sources, tools or None))
    return made


def _continued(converted: Converted) -> Converted:
    """A Messages conversation that ends with an assistant turn: the answer continues it, as that protocol's clients mean it."""
    *before, last = converted.conversation.messages
    if last.tool_calls:
        raise RequestError("messages: the last message calls a tool; its result must follow", param="messages")
    final = recipe.AssistantMessage(last.content, last.reasoning_content, None, True)
    converted.options.thinking_initial_stage = recipe.ThinkingInitialStage.ContentContinuation
    return Converted(
        conversation=_rebuilt(converted.conversation, messages=[*before, final]),
        request=converted.request,
        options=converted.options,
        tool_rule=converted.tool_rule,
        make_generator=lambda _, answer_id, model: recipe.MessagesChunkGenerator(answer_id, model, False),
    )


def _with_format(conversation: recipe.Conversation, response_format: Any) -> recipe.Conversation:
    """The same conversation that also tells the model what its answer must look like.

    Done by hand: the codec's own conversion refuses json_object unless the prompt says "json"; here the answer is held to it anyway.
    """
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "json_object":
        return _rebuilt(conversation, response_format="json_object")
    if kind == "json_schema" and isinstance(response_format.get("json_schema"), Mapping):
        return _rebuilt(conversation, response_schema=response_format["json_schema"].get("schema"))
    return conversation
