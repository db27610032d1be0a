# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions: raw prompts, one or many, as text or token ids. The engine itself looks for stop strings and unrolls n.

`echo` puts the prompt in front of each answer, with its log-probabilities if `logprobs` asks for them; with `max_tokens: 0` it only scores.
Answers are numbered prompt by prompt: choice i of prompt p has index p * n + i.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from whalefall.core.errors import BadSampling
from whalefall.core.sampling import SamplingParams
from whalefall.server import sse
from whalefall.server.body import parse, read_json
from whalefall.server.door import Door, Engine
from whalefall.server.fan import Fan
from whalefall.server.openai.answer import Envelope, Usage, check_fault, respond
from whalefall.server.openai.logprobs import CompletionLogprobs, prompt_entries
from whalefall.server.openai.schema import CompletionRequest

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str
    token_ids: list[int]


async def completions(request: Request) -> Response:
    door: Door = request.app.state.door
    ask = parse(CompletionRequest, await read_json(request, door.config.max_body_bytes))
    door.check_model(ask.model)
    engine = door.admit()
    _check_count(ask, door)
    sampling = _sampling(ask, engine)
    prompts = [await _read_prompt(door, engine, ask, given) for given in ask.prompt]
    for prompt in prompts:
        engine.validate(prompt.token_ids, sampling)
    await engine.prepare(sampling)
    answer = _Answer(door, engine, ask, prompts, sampling)
    return await sse.until_disconnect(request.receive, answer.stream() if ask.stream else answer.whole())


def _check_count(ask: CompletionRequest, door: Door) -> None:
    count = len(ask.prompt) * ask.num_choices
    if count > door.config.max_choices:
        raise BadSampling(f"{len(ask.prompt)} prompts x n {ask.num_choices} = {count} answers, limit {door.config.max_choices}", param="n")


def _sampling(ask: CompletionRequest, engine: Engine) -> SamplingParams:
    limit = DEFAULT_MAX_TOKENS if ask.max_tokens is None else ask.max_tokens
    chosen: dict[str, Any] = {"max_tokens": limit, "logprobs": ask.logprobs, "structured_outputs": ask.structure}
    if ask.echo and (ask.logprobs is not None or limit == 0):
        chosen["prompt_logprobs"] = max(ask.logprobs or 0, ask.prompt_logprobs or 0)
    return ask.sampling(engine.config.max_logprobs, **chosen)


async def _read_prompt(door: Door, engine: Engine, ask: CompletionRequest, given: str | list[int]) -> _Prompt:
    tokenizer = engine.tokenizer
    if isinstance(given, str):
        # A raw prompt is all the client's own, control tokens included, as in LLM.generate; who puts other people's text in it says no.
        rules = {"add_bos": ask.add_special_tokens is not False, "allow_special": ask.parse_special_tokens is not False}
        ids = await door.encode(lambda: tokenizer.encode(given, **rules), len(given), "prompt")
        return _Prompt(given, ids)
    return _Prompt(tokenizer.decode(given, skip_special_tokens=False) if ask.echo else "", given)


class _Choice:
    """One answer under way: its text, and the log-probabilities not sent yet."""

    def __init__(self, index: int, ask: CompletionRequest, tokenizer: Any) -> None:
        self.index = index
        self.text = ""
        self.has_begun = False
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.logprobs = None if ask.logprobs is None else CompletionLogprobs(tokenizer, ask.logprobs)

    def echo(self, prompt: _Prompt, prompt_logprobs: list[Any]) -> str:
        """The prompt as the beginning of the answer."""
        self.text += prompt.text
        if self.logprobs is not None:
            for place, (token_id, alternatives) in enumerate(zip(prompt.token_ids, prompt_logprobs, strict=True)):
                text = self.logprobs.names.token_text(token_id)
                # A begin-of-sequence token that was put in front of the text is not part of it.
                is_hidden = place == 0 and not prompt.text.startswith(text)
                self.logprobs.add(token_id, alternatives, 0 if is_hidden else len(text))
        return prompt.text

    def feed(self, output: Any) -> str:
        self.has_begun = True
        self.text += output.text
        self.token_ids += output.token_ids
        if self.logprobs is not None and output.logprobs:
            for place, (token_id, alternatives) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
                self.logprobs.add(token_id, alternatives, len(output.token_texts[place]))
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = str(output.finish_reason), output.stop_reason
        text: str = output.text
        return text

    def take_logprobs(self) -> dict[str, Any] | None:
        return None if self.logprobs is None else self.logprobs.take()


class _Answer:
    """One request from the first engine output to the last byte."""

    def __init__(self, door: Door, engine: Engine, ask: CompletionRequest, prompts: list[_Prompt], sampling: SamplingParams) -> None:
        self._door = door
        self._ask = ask
        self._prompts = prompts
        self._tokenizer = engine.tokenizer
        self._outer = Envelope(door, "cmpl", "text_completion")
        self._usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts))
        self._scores: list[list[Any]] = [[] for _ in prompts]
        """Prompt log-probabilities per prompt, once they have come."""
        n = ask.num_choices
        self._choices = [[_Choice(p * n + i, ask, engine.tokenizer) for i in range(n)] for p in range(len(prompts))]
        self._ids = [self._outer.id if len(prompts) == 1 else f"{self._outer.id}-{p}" for p in range(len(prompts))]
        self._fan = Fan(
            [
                engine.generate(prompt.token_ids, sampling, request_id, prompt=prompt.text, **ask.cache_use)
                for prompt, request_id in zip(prompts, self._ids, strict=True)
            ]
        )
        self._needs_scores = bool(ask.echo) and ask.logprobs is not None
        self._cached = [0] * len(prompts)

    async def whole(self) -> Response:
        self._door.active.update(self._ids)
        try:
            async for _ in self._steps():
                pass
        finally:
            await self._close()
        items = [self._whole_choice(choice, p) for p, choices in enumerate(self._choices) for choice in choices]
        return respond(self._outer.around(items, self._usage))

    async def stream(self) -> Response:
        self._door.active.update(self._ids)
        try:
            check_fault(await self._fan.wait_first(self._door.config.first_token_wait_s))
        except BaseException:
            await self._close()
            raise
        return sse.EventStream(sse.with_error_event(self._events()), on_close=self._close, keep_alive_s=self._door.config.keep_alive_s)

    async def _steps(self) -> AsyncGenerator[tuple[_Choice, str, list[int]], None]:
        """Every step of every choice: the choice, its new text, its new tokens. The echoed prompt comes with the first step."""
        waiting: list[list[Any]] = [[] for _ in self._prompts]
        async for p, output in self._fan.items():
            check_fault(output)
            self._scores[p] += output.prompt_logprobs or ()
            self._cached[p] = max(self._cached[p], output.num_cached_tokens)
            self._usage.cached_tokens = sum(self._cached)
            waiting[p] += output.outputs
            if self._needs_scores and not self._scores[p]:
                continue  # another choice may speak before the first one has scored the prompt, which must be echoed before
            moves, waiting[p] = waiting[p], []
            for moved in moves:
                choice = self._choices[p][moved.index]
                text = choice.echo(self._prompts[p], self._scores[p]) if self._ask.echo and not choice.has_begun else ""
                text += choice.feed(moved)
                self._usage.completion_tokens += len(moved.token_ids)
                yield choice, text, list(moved.token_ids)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        async for choice, text, token_ids in self._steps():
            logprobs = choice.take_logprobs()
            if text or logprobs:
                item = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}
                yield self._chunk({**item, "token_ids": token_ids} if self._ask.return_token_ids else item)
            if choice.finish_reason is not None:
                item = {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason}
                yield self._chunk({**item, "stop_reason": choice.stop_reason})
        if self._ask.wants_usage:
            yield self._outer.event([], self._usage)
        yield sse.DONE

    def _chunk(self, item: dict[str, Any]) -> bytes:
        return self._outer.event([item], self._usage if self._ask.wants_running_usage else None)

    def _whole_choice(self, choice: _Choice, p: int) -> dict[str, Any]:
        item = {
            "index": choice.index,
            "text": choice.text,
            "logprobs": choice.take_logprobs(),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._ask.prompt_logprobs is not None:
            item["prompt_logprobs"] = prompt_entries(self._tokenizer, self._scores[p])
        if self._ask.return_token_ids:
            item["token_ids"] = choice.token_ids
            item["prompt_token_ids"] = self._prompts[p].token_ids
        return item

    async def _close(self) -> None:
        await self._fan.aclose()
        self._door.active.difference_update(self._ids)
        self._outer.log_end(self._usage, [choice.finish_reason for choices in self._choices for choice in choices])
