# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: a conversation to token ids, engine outputs to chunks or one answer.

A stop string counts in the content only, so it is found here, behind the parser, and the engine is told to end that choice. The text goes
through the parser token by token, so that counts and logprobs end with the token that completes the match.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from whalefall.core.errors import BadSampling
from whalefall.core.request import FinishReason
from whalefall.core.sampling import MAX_LOGPROBS, SamplingParams
from whalefall.core.structure import StructuredSpec
from whalefall.server import sse
from whalefall.server.body import parse, read_json
from whalefall.server.door import Door, Engine
from whalefall.server.fan import Fan
from whalefall.server.openai.answer import Envelope, Usage, check_fault, content_size, hidden_ids, respond, validate
from whalefall.server.openai.logprobs import chat_entry, prompt_entries
from whalefall.server.openai.schema import ChatRequest, check_logprobs
from whalefall.text.chat import ChatPrompt, Delta, ToolCallDelta


async def chat_completions(request: Request) -> Response:
    door: Door = request.app.state.door
    body = await read_json(request, door.config.max_body_bytes)
    ask = parse(ChatRequest, body)
    door.check_model(ask.model)
    engine = door.admit()
    content = ask.structure
    prompt = await _encode(door, body, ask)
    if ask.num_choices > door.config.max_choices:
        raise BadSampling(f"n must be at most {door.config.max_choices}, got {ask.num_choices}", param="n")
    sampling = _sampling(ask, prompt, engine, prompt.structure(content, engine.tokenizer.token_to_id("</think>")))
    validate(engine, prompt.token_ids, sampling, "messages")
    await engine.prepare(sampling)
    conversation = _Conversation(door, engine, ask, prompt, sampling)
    if ask.stream:
        return await sse.until_disconnect(request.receive, conversation.stream())
    return await sse.until_disconnect(request.receive, conversation.whole())


async def _encode(door: Door, body: dict[str, Any], ask: ChatRequest) -> ChatPrompt:
    size = content_size(body.get("messages"))
    return await door.encode(lambda: door.codec.encode(body, ask.stop or ()), size, "messages")


def _sampling(ask: ChatRequest, prompt: ChatPrompt, engine: Engine, structure: StructuredSpec | None) -> SamplingParams:
    limit, max_logprobs = ask.token_limit, engine.config.max_logprobs
    check_logprobs(ask.top_logprobs, "top_logprobs", max_logprobs if max_logprobs >= 0 else MAX_LOGPROBS)
    chosen = prompt.default_max_tokens(engine.config.max_model_len) if limit is None else limit
    return ask.chat_sampling(max_logprobs, chosen, structure, logprobs=(ask.top_logprobs or 0) if ask.logprobs else None)


class _Choice:
    """One answer under way."""

    def __init__(self, index: int, ask: ChatRequest, prompt: ChatPrompt, tokenizer: Any) -> None:
        self.index = index
        self.answer = Delta()
        """Everything said so far."""
        self.token_ids: list[int] = []
        self.entries: list[dict[str, Any]] = []
        """Logprobs not sent yet; they go out with the next words."""
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._num_top = (ask.top_logprobs or 0) if ask.logprobs else None
        self._include_stop = bool(ask.include_stop_str_in_output)
        self._tokenizer = tokenizer
        self._parser = prompt.parser()
        self._hidden = frozenset() if ask.skip_special_tokens is False else hidden_ids(tokenizer)

    def feed(self, output: Any) -> Delta:
        """One step's output of the engine -> what it adds to the answer. What lies behind a stop string is dropped."""
        delta = Delta()
        for place, token_id in enumerate(output.token_ids):
            delta.add(self._take(token_id, output.token_texts[place], output.logprobs[place] if output.logprobs else None))
            if self._parser.has_stopped:
                break
        if self._parser.has_stopped:
            self._end(delta, "stop", self._parser.stop_string)
        elif output.finish_reason is not None:
            # An end without a token (abort) may still bring text that the engine had held back.
            for text in output.token_texts[len(output.token_ids) :]:
                delta.add(self._parser.push(text))
            self._end(delta, str(output.finish_reason), output.stop_reason)
        self.answer.add(delta)
        return delta

    def take_entries(self) -> dict[str, Any] | None:
        entries, self.entries = self.entries, []
        return {"content": entries} if entries else None

    def _take(self, token_id: int, text: str, alternatives: Any) -> Delta:
        self.token_ids.append(token_id)
        self.num_reasoning_tokens += self._parser.is_reasoning
        if self._num_top is not None and alternatives is not None:
            self.entries.append(chat_entry(self._tokenizer, token_id, alternatives, self._num_top))
        if token_id in self._hidden:
            text = text.removesuffix(self._tokenizer.token_text(token_id))
        return self._parser.push(text)

    def _end(self, delta: Delta, reason: str, stop_reason: str | int | None) -> None:
        if not self._parser.has_stopped:
            delta.add(self._parser.finish("stop" if reason == "stop" else "length"))
        elif self._include_stop and isinstance(stop_reason, str):
            delta.content += stop_reason
        # The parser knows whether an answer ended in a tool call; the engine's abort stays an abort.
        self.finish_reason = self._parser.finish_reason if reason in ("stop", "length") else reason
        self.stop_reason = stop_reason

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.answer.content}
        if self.answer.reasoning:
            # Clients look under either name.
            message["reasoning_content"] = message["reasoning"] = self.answer.reasoning
        if self.answer.tool_calls:
            message["content"] = self.answer.content or None
            message["tool_calls"] = [_tool_call(call) for call in _whole_calls(self.answer.tool_calls)]
        return message


def _whole_calls(pieces: list[ToolCallDelta]) -> list[ToolCallDelta]:
    calls: dict[int, ToolCallDelta] = {}
    for piece in pieces:
        known = calls.get(piece.index)
        calls[piece.index] = piece if known is None else ToolCallDelta(known.index, known.id, known.name, known.arguments + piece.arguments)
    return list(calls.values())


def _tool_call(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _delta_json(delta: Delta) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = fields["reasoning"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    if delta.tool_calls:
        fields["tool_calls"] = [
            {"index": call.index, **_tool_call(call)} if call.name else {"index": call.index, "function": {"arguments": call.arguments}}
            for call in delta.tool_calls
        ]
    return fields


class _Conversation:
    """One request from the first engine output to the last byte."""

    def __init__(self, door: Door, engine: Engine, ask: ChatRequest, prompt: ChatPrompt, sampling: SamplingParams) -> None:
        self._door = door
        self._ask = ask
        self._prompt = prompt
        self._engine = engine
        self._outer = Envelope(door, "chatcmpl", "chat.completion.chunk" if ask.stream else "chat.completion")
        self._usage = Usage(prompt_tokens=len(prompt.token_ids), reasoning_tokens=0)
        self._prompt_logprobs: list[Any] = []
        self._choices = [_Choice(index, ask, prompt, engine.tokenizer) for index in range(ask.num_choices)]
        self._fan = Fan([engine.generate(prompt.token_ids, sampling, self._outer.id, prompt=prompt.text, **ask.cache_use)])

    async def whole(self) -> Response:
        self._door.active.add(self._outer.id)
        try:
            async for _ in self._steps():
                pass
        finally:
            await self._close()
        more = {"prompt_logprobs": prompt_entries(self._engine.tokenizer, self._prompt_logprobs)} if self._prompt_logprobs else {}
        return respond(self._outer.around([self._whole_choice(choice) for choice in self._choices], self._usage, **more))

    async def stream(self) -> Response:
        self._door.active.add(self._outer.id)
        try:
            check_fault(await self._fan.wait_first(self._door.config.first_token_wait_s))
        except BaseException:
            await self._close()
            raise
        return sse.EventStream(sse.with_error_event(self._events()), on_close=self._close, keep_alive_s=self._door.config.keep_alive_s)

    async def _steps(self) -> AsyncGenerator[tuple[_Choice, Delta, list[int]], None]:
        """Every step of every choice until all have ended: the choice, what is new in it, its new tokens."""
        async for _, output in self._fan.items():
            check_fault(output)
            self._prompt_logprobs += output.prompt_logprobs or ()
            self._usage.cached_tokens = output.num_cached_tokens
            for moved in output.outputs:
                choice = self._choices[moved.index]
                if choice.finish_reason is not None:
                    continue  # the engine had run on behind a stop string
                before = len(choice.token_ids)
                delta = choice.feed(moved)
                self._count()
                if choice.finish_reason is not None and moved.finish_reason is None:
                    await self._engine.abort(self._outer.id, choice=choice.index, reason=FinishReason.STOP)
                yield choice, delta, choice.token_ids[before:]

    def _count(self) -> None:
        self._usage.completion_tokens = sum(len(choice.token_ids) for choice in self._choices)
        self._usage.reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self._choices)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        opening = {"role": "assistant", "reasoning_content" if self._prompt.is_thinking else "content": ""}
        for choice in self._choices:
            yield self._chunk({"index": choice.index, "delta": opening, "logprobs": None, "finish_reason": None})
        async for choice, delta, token_ids in self._steps():
            if delta or choice.entries:
                item = {"index": choice.index, "delta": _delta_json(delta), "logprobs": choice.take_entries(), "finish_reason": None}
                yield self._chunk({**item, "token_ids": token_ids} if self._ask.return_token_ids else item)
            if choice.finish_reason is not None:
                item = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": choice.finish_reason}
                yield self._chunk({**item, "stop_reason": choice.stop_reason})
        if self._ask.wants_usage:
            yield self._outer.event([], self._usage)
        yield sse.DONE

    def _chunk(self, item: dict[str, Any]) -> bytes:
        return self._outer.event([item], self._usage if self._ask.wants_running_usage else None)

    def _whole_choice(self, choice: _Choice) -> dict[str, Any]:
        item = {
            "index": choice.index,
            "message": choice.message(),
            "logprobs": choice.take_entries(),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return {**item, "token_ids": choice.token_ids} if self._ask.return_token_ids else item

    async def _close(self) -> None:
        await self._fan.aclose()
        self._door.active.discard(self._outer.id)
        self._outer.log_end(self._usage, [choice.finish_reason for choice in self._choices])
