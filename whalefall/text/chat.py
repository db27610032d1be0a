# SPDX-License-Identifier: Apache-2.0
"""Conversations to prompts, and generated text back to answers: our thin interface over the deepseek-recipe codec.

`codec_for(chat_format, tokenizer)` gives a `ChatCodec`. Its `encode` turns a request body into a `ChatPrompt`: token ids, and whether the
prompt opened a thinking block. The prompt hands out one `OutputParser` per answer, so rendering and parsing never disagree about thinking.
Knows neither engine nor HTTP. Special tokens come from template positions only: text that merely spells one is encoded as ordinary text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import deepseek_recipe as recipe

from whalefall.core.errors import RequestError
from whalefall.core.structure import StructuredSpec
from whalefall.text.tool_grammar import CallFormat, ToolRule, read_tools, tool_spec

ChatFormat = Literal["deepseek_v4", "deepseek_v41", "none"]

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
"""`developer` is read as `system`, as newer OpenAI clients mean it."""

_MODEL_NAME = "model"
_VERSIONS = {"deepseek_v4": recipe.ModelVersion.DeepseekV4Pro, "deepseek_v41": recipe.ModelVersion.DeepseekV41Flash}
_ENCODINGS: dict[str, Any] = {"deepseek_v4": recipe.DeepseekV4Encoding, "deepseek_v41": recipe.DeepseekV41Encoding}
_BODY_FIELDS = ("messages", "tools", "thinking", "reasoning_effort", "tool_choice")
"""What the codec reads. tool_choice comes last: whether it is fine depends on the others."""
_WRONG_SHAPE = (ValueError, TypeError, OverflowError, RecursionError)
"""What the codec's deserialiser raises before its own checks begin."""
_IMAGE_PARTS = ("image", "image_url", "input_image")


class TextEncoder(Protocol):
    """The one thing a codec asks of a tokenizer (`text.tokenizer.Tokenizer` has it)."""

    def encode(self, text: str, *, add_bos: bool, allow_special: bool) -> list[int]: ...


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


class OutputParser:
    """Sorts the text of one answer into reasoning, content and tool calls, and watches for stop strings in the content.

    Push the text of one token at a time: then `has_stopped` turns true with exactly the token that completes a stop string. Text that might
    begin a stop string or a marker waits; `finish` lets it go. A stop string is never part of the content.
    """

    def __init__(self, request: recipe.ConversationRequest, options: recipe.ParsingOptions) -> None:
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "", _MODEL_NAME)
        self._processor = recipe.StreamProcessor(generator, options)
        self._processor.push(recipe.InferenceChunk.ready())
        self._stops = list(options.stop_sequences)
        self._tail = ""
        stage = options.thinking_initial_stage
        self.is_reasoning = stage is not None and stage.starts_in_reasoning()
        """Whether everything so far belongs to the reasoning."""
        self.finish_reason: str | None = None
        """stop, length or tool_calls, once the answer has ended."""
        self.stop_string: str | None = None
        """The stop string that ended it."""

    @property
    def has_stopped(self) -> bool:
        return self.finish_reason is not None

    def push(self, text: str) -> Delta:
        """The text of one token -> what can be said now; nothing after the answer has stopped."""
        if self.has_stopped or not text:
            return Delta()
        delta = self._take(self._processor.push(recipe.InferenceChunk.text(text, 1)))
        if self._stops:
            self._remember(text)
        return delta

    def finish(self, reason: Literal["stop", "length"]) -> Delta:
        """The engine has ended: release what was held back and settle the finish reason."""
        if self.has_stopped:
            return Delta()
        chosen = recipe.InferenceFinishReason.Stop if reason == "stop" else recipe.InferenceFinishReason.Length
        return self._take(self._processor.push(recipe.InferenceChunk.finish(chosen)))

    def _take(self, chunks: Sequence[Any]) -> Delta:
        delta = Delta()
        for chunk in chunks:
            choice = json.loads(chunk.to_json())["choices"][0]
            delta.add(_read_delta(choice["delta"]))
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        if delta.content or delta.tool_calls:
            self.is_reasoning = False
        return delta

    def _remember(self, text: str) -> None:
        """Find out which stop string matched: the one that was complete first, and of two that end together the longer."""
        self._tail = (self._tail + text).rpartition("</think>")[2]  # stop strings count in the content only
        if self.has_stopped:
            found = [(start + len(stop), start, stop) for stop in self._stops if (start := self._tail.find(stop)) >= 0]
            self.stop_string = min(found)[2] if found else None
        self._tail = self._tail[-max(map(len, self._stops)) :]


def _read_delta(fields: Mapping[str, Any]) -> Delta:
    calls = [
        ToolCallDelta(call["index"], call.get("id"), call["function"].get("name"), call["function"].get("arguments") or "")
        for call in fields.get("tool_calls") or ()
    ]
    return Delta(fields.get("content") or "", fields.get("reasoning_content") or "", calls)


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
        """A fresh parser for one answer."""
        return OutputParser(self.request, self.options)

    def default_max_tokens(self, context_limit: int) -> int:
        """Tokens to generate when the client names no limit: the protocol's default, within what the context leaves."""
        if len(self.token_ids) >= context_limit:
            return 1
        return int(self.request.resolve_max_tokens(len(self.token_ids), context_limit))


class ChatCodec(Protocol):
    def encode(self, body: Mapping[str, Any], stop: Sequence[str] = ()) -> ChatPrompt:
        """Render the conversation in a chat completions body and encode it.

        Reads messages, tools, tool_choice, parallel_tool_calls, response_format, thinking, reasoning_effort and
        chat_template_kwargs.thinking; ignores everything else.
        Raises:
            RequestError: the conversation is malformed; `param` names the place.
        """
        ...


def codec_for(chat_format: ChatFormat, tokenizer: TextEncoder) -> ChatCodec:
    """The codec of a `ModelDefinition.chat_format`."""
    return PlainCodec(tokenizer) if chat_format == "none" else DeepseekCodec(chat_format, tokenizer)


class DeepseekCodec:
    """The protocol of DeepSeek-V4 and V4.1. Thinking is on unless the request, or else the tokenizer's own config, says otherwise."""

    def __init__(self, chat_format: Literal["deepseek_v4", "deepseek_v41"], tokenizer: TextEncoder) -> None:
        self._tokenizer = tokenizer
        self._thinks: bool = getattr(tokenizer, "thinks_by_default", True)
        self._call_format: CallFormat = chat_format
        self._encoding = _ENCODINGS[chat_format]()
        self._conversion = recipe.ConversionOptions().with_model_alias(_MODEL_NAME, _VERSIONS[chat_format])

    def encode(self, body: Mapping[str, Any], stop: Sequence[str] = ()) -> ChatPrompt:
        fields = _recipe_body(body, self._thinks)
        request = self._convert_choice(fields)
        options = request.parsing_options
        options.stop_sequences = list(stop)
        rendered = self._encoding.render_conversation(_with_format(request.conversation, body.get("response_format")))
        stage = options.thinking_initial_stage
        return ChatPrompt(
            text=rendered.prompt,
            token_ids=self._encode_ranges(rendered.prompt, rendered.special_ranges),
            is_thinking=stage is not None and stage.starts_in_reasoning(),
            request=request,
            options=options,
            tool_rule=_tool_rule(fields, body.get("parallel_tool_calls"), is_opened=options.starts_in_tool_calls),
            call_format=self._call_format,
        )

    def _convert_choice(self, fields: dict[str, Any]) -> recipe.ConversationRequest:
        """Convert; a forced tool call is allowed while thinking too.

        The codec opens the block of calls in the prompt, which leaves no room for reasoning, and so refuses it. Here the prompt of such a
        request is that of tool_choice auto, and `ChatPrompt.structure` sees to it that a call follows the reasoning.
        """
        if _forced_name(fields.get("tool_choice")) is None:
            return self._convert(fields)
        free = self._convert({**fields, "tool_choice": "auto"})
        if not free.conversation.thinking_mode:
            return self._convert(fields)
        probe = {name: value for name, value in fields.items() if name != "reasoning_effort"}
        self._convert({**probe, "thinking": {"type": "disabled"}})  # the choice itself must be sound
        return free

    def _convert(self, body: dict[str, Any]) -> recipe.ConversationRequest:
        try:
            return recipe.ChatCompletionRequest(body).convert(self._conversion)
        except recipe.ConversionError as error:
            message = json.loads(error.body)["error"]["message"]
        except _WRONG_SHAPE as error:
            message = str(error).removeprefix("invalid request body: ")
        param = self._blame(body)
        raise RequestError(f"{param}: {message}", param=param)

    def _blame(self, body: dict[str, Any]) -> str:
        """The codec's messages carry no field: put the fields under a good message one by one, the first refusal names the culprit."""
        probe: dict[str, Any] = {"model": _MODEL_NAME, "messages": [{"role": "user", "content": "json"}]}
        for name in _BODY_FIELDS[1:]:
            if name in body:
                probe[name] = body[name]
                try:
                    recipe.ChatCompletionRequest(probe).convert(self._conversion)
                except (recipe.ConversionError, *_WRONG_SHAPE):
                    return name
        return "messages"

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


def _forced_name(choice: Any) -> str | None:
    """The tool that a choice demands; "" for any of them, None for none."""
    if choice == "required":
        return ""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _tool_rule(fields: Mapping[str, Any], parallel: Any, *, is_opened: bool) -> ToolRule | None:
    """A named choice means one call of that tool. So does `required` one call, unless parallel_tool_calls is true in so many words."""
    choice = fields.get("tool_choice")
    tools = () if choice == "none" else read_tools(fields.get("tools"))
    forced = _forced_name(choice)
    if forced:
        tools = tuple(tool for tool in tools if tool.name == forced)
    if not tools and forced is not None:
        raise RequestError("tool_choice demands a call, but there are no tools to call", param="tool_choice")
    if not tools:
        return None
    is_one = parallel is False or bool(forced) or (forced is not None and parallel is not True)
    return ToolRule(tools=tools, must_call=forced is not None, is_opened=is_opened, one_call=is_one)


def _with_format(conversation: recipe.Conversation, response_format: Any) -> recipe.Conversation:
    """The same conversation that also tells the model what its answer must look like.

    Done by hand: the codec's own conversion refuses json_object unless the prompt says "json"; here the answer is held to it anyway.
    """
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "json_object":
        chosen: dict[str, Any] = {"response_format": "json_object"}
    elif kind == "json_schema" and isinstance(response_format.get("json_schema"), Mapping):
        chosen = {"response_schema": response_format["json_schema"].get("schema")}
    else:
        return conversation
    return recipe.Conversation(
        conversation.messages,
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        reasoning_effort=conversation.reasoning_effort,
        **chosen,
    )


class PlainCodec:
    """For models without a chat protocol: `role: text` lines, then `assistant:`. No reasoning, no tools.

    system: Be brief.
    user: Hi
    assistant:
    """

    def __init__(self, tokenizer: TextEncoder) -> None:
        self._tokenizer = tokenizer

    def encode(self, body: Mapping[str, Any], stop: Sequence[str] = ()) -> ChatPrompt:
        messages = check_messages(body.get("messages"))
        text = "".join(f"{message['role']}: {_plain_text(message.get('content'))}\n" for message in messages) + "assistant:"
        conversation = recipe.Conversation([], thinking_mode=False)
        return ChatPrompt(
            text=text,
            token_ids=self._tokenizer.encode(text, add_bos=True, allow_special=False),
            is_thinking=False,
            request=recipe.ConversationRequest(conversation, recipe.ModelVersion.DeepseekV41Flash),
            options=recipe.ParsingOptions(
                parse_tool_calls=False,
                # A continuation keeps leading newlines: this text has no protocol to strip.
                thinking_initial_stage=recipe.ThinkingInitialStage.ContentContinuation,
                stop_sequences=list(stop),
            ),
        )


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Check the shape of a messages list; `developer` becomes `system`. Raises RequestError naming index and field."""
    if not isinstance(messages, list | tuple):
        got = "missing" if messages is None else f"got {_short(messages)}"
        raise RequestError(f"messages must be a list of messages ({got})", param="messages")
    if not messages:
        raise RequestError("messages is empty: at least one message is needed", param="messages")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{place} must be an object with role and content, got {_short(message)}", param=place)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{place}.role must be one of {', '.join(ROLES)}, got {_short(role)}", param=f"{place}.role")
    _check_content(message, role, f"{place}.content")
    return {**message, "role": "system" if role == "developer" else role}


def _check_content(message: Mapping[str, Any], role: str, place: str) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and role == "assistant" and message.get("tool_calls")):
        return
    if not isinstance(content, list):
        rule = "a string or a list of text parts" + ("; null only beside tool_calls" if role == "assistant" else "")
        raise RequestError(f"{place} must be {rule}, got {_short(content)}", param=place)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _IMAGE_PARTS:
            raise RequestError(f"image input is not supported by this server yet ({place}[{index}])", param="messages")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f'{place}[{index}] must be {{"type": "text", "text": "..."}}, got {_short(part)}', param=f"{place}[{index}]")


def _recipe_body(body: Mapping[str, Any], thinks_by_default: bool) -> dict[str, Any]:
    fields = {name: body[name] for name in _BODY_FIELDS if body.get(name) is not None}
    fields["messages"] = check_messages(body.get("messages"))
    thinking = _template_thinking(body.get("chat_template_kwargs"))
    if thinking is not None:
        fields.setdefault("thinking", {"type": "enabled" if thinking else "disabled"})
    if not thinks_by_default and "reasoning_effort" not in fields:
        fields.setdefault("thinking", {"type": "disabled"})
    return {"model": _MODEL_NAME, **fields}


def _template_thinking(kwargs: Any) -> bool | None:
    """Clients of other engines switch thinking through chat_template_kwargs; both spellings count."""
    if kwargs is None:
        return None
    if not isinstance(kwargs, Mapping):
        raise RequestError(f"chat_template_kwargs must be an object, got {_short(kwargs)}", param="chat_template_kwargs")
    chosen = kwargs.get("thinking", kwargs.get("enable_thinking"))
    if chosen is not None and not isinstance(chosen, bool):
        raise RequestError(
            f"chat_template_kwargs.thinking must be true or false, got {_short(chosen)}", param="chat_template_kwargs.thinking"
        )
    return chosen


def _plain_text(content: Any) -> str:
    return content if isinstance(content, str) else "\n\n".join(part["text"] for part in content or ())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
