# SPDX-License-Identifier: Apache-2.0
"""LLM: the offline API, shaped as vLLM's users know it. The engine runs in the caller's thread, inside `generate`.

llm = LLM(model="path/to/checkpoint", dtype="float32")
for output in llm.generate(["The whale", {"prompt_token_ids": [0, 17]}], SamplingParams(max_tokens=32)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

import numpy as np

from whalefall.core.errors import EngineDead, RequestError
from whalefall.core.request import AbortRequests, FinishReason
from whalefall.core.sampling import SamplingParams
from whalefall.core.seams import Clock, MonotonicClock
from whalefall.engine.assembly import OpenRequest, OutputProcessor
from whalefall.engine.config import EngineConfig
from whalefall.engine.core import EngineCore
from whalefall.engine.outputs import RequestOutput
from whalefall.engine.seeds import seed_source
from whalefall.engine.validate import check_prompt, check_sampling
from whalefall.engine.wiring import OpenModel, load_engine, open_model
from whalefall.observe.metrics import EngineStats
from whalefall.observe.progress import progress_bar
from whalefall.text.tokenizer import Tokenizer

PromptType: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
"""Text; token ids; {"prompt": text}; {"prompt_token_ids": ids}. A mapping may also hold "cache_salt"."""
Conversation: TypeAlias = Sequence[Mapping[str, Any]]


class _Prompt(NamedTuple):
    text: str | None
    token_ids: list[int]
    cache_salt: str = ""


class LLM:
    def __init__(
        self,
        model: str | Path,
        *,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        max_model_len: int | None = None,
        max_logprobs: int = -1,
        use_tqdm: bool = True,
        **options: Any,
    ) -> None:
        """Load a checkpoint.

        Args:
            use_tqdm: show a progress bar while loading, on a terminal.
            options: further fields of EngineConfig.
        Raises:
            ConfigError: every problem found, before any weight is read where possible.
        """
        named = {"model": model, "device": device, "dtype": dtype, "max_model_len": max_model_len, "max_logprobs": max_logprobs}
        opened = open_model(EngineConfig.from_options(named | options))
        clock = MonotonicClock()
        with progress_bar("loading", unit="bytes", is_shown=use_tqdm) as progress:
            core = load_engine(opened, progress=progress, clock=clock)
        self._set_up(opened, core, clock)

    @classmethod
    def from_parts(cls, opened: OpenModel, core: EngineCore, clock: Clock) -> Self:
        """Around an engine that exists already."""
        llm = cls.__new__(cls)
        llm._set_up(opened, core, clock)
        return llm

    def _set_up(self, opened: OpenModel, core: EngineCore, clock: Clock) -> None:
        self.config = opened.config
        self.definition = opened.definition
        self.model_config = opened.model_config
        self.tokenizer = opened.tokenizer
        self.core = core
        self._eos_token_ids = opened.eos_token_ids
        self._clock = clock
        self._processor = OutputProcessor(self.tokenizer, seed_source(self.config.seed))
        self._grammars = core.grammars or opened.grammar_store()
        self._ids = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts.

        Args:
            prompts: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; or a list of those.
            sampling_params: for all prompts, or one per prompt.
        Raises:
            RequestError: a prompt or its parameters cannot run here; nothing has been started then.
            EngineDead: the engine has failed, now or earlier.
        """
        pairs = [self._read_prompt(prompt) for prompt in _as_list(prompts)]
        return self._run(pairs, _one_each(sampling_params, len(pairs)), is_shown=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **body: Any,
    ) -> list[RequestOutput]:
        """Answers to conversations in the model's own chat format; the text is raw, with its reasoning if the model writes any.

        Args:
            messages: one conversation, or a list of them.
            sampling_params: structured_outputs holds for the answer, from the end of its reasoning on.
            body: further fields of a chat request: tools, tool_choice, thinking, reasoning_effort, chat_template_kwargs.
        """
        from whalefall.text.chat import codec_for  # here, so that the engine runs where the chat protocol's package is missing

        first = messages[0] if messages else None
        conversations = cast("list[Conversation]", [messages] if first is None or isinstance(first, Mapping) else messages)
        codec = codec_for(self.definition.chat_format, self.tokenizer)
        prompts = [codec.encode({**body, "messages": conversation}) for conversation in conversations]
        pairs: list[_Prompt] = [_Prompt(prompt.text, list(prompt.token_ids)) for prompt in prompts]
        think_end_id = self.tokenizer.token_to_id("</think>")
        params = [
            replace(sampling, structured_outputs=prompt.structure(sampling.structured_outputs, think_end_id))
            for prompt, sampling in zip(prompts, _one_each(sampling_params, len(pairs)), strict=True)
        ]
        return self._run(pairs, params, is_shown=use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forget what was computed for earlier prompts."""
        self.core.scheduler.reset_prefix_cache()
        return True

    def stats(self) -> EngineStats:
        self._processor.stats.engine = self.core.gauges
        return self._processor.stats

    def shutdown(self) -> None:
        """End what runs and free the memory; `generate` raises EngineDead afterwards."""
        self.core.stop()
        self.core.run(lambda updates: None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    def _read_prompt(self, prompt: PromptType) -> _Prompt:
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if not keys & {"prompt", "prompt_token_ids"} or keys - {"prompt", "prompt_token_ids", "cache_salt"}:
                raise RequestError(
                    f"a prompt mapping holds 'prompt' or 'prompt_token_ids', and maybe 'cache_salt', got {sorted(keys)}", param="prompt"
                )
            salt = prompt.get("cache_salt") or ""
            if not isinstance(salt, str):
                raise RequestError(f"cache_salt must be a text, got {salt!r}", param="cache_salt")
            if "prompt_token_ids" in prompt:
                return _Prompt(prompt.get("prompt"), _as_ids(prompt["prompt_token_ids"]), salt)
            return self._read_prompt(prompt["prompt"])._replace(cache_salt=salt)
        if isinstance(prompt, str):
            return _Prompt(prompt, self.tokenizer.encode(prompt, add_bos=True, allow_special=True))
        return _Prompt(None, _as_ids(prompt))

    def _run(self, pairs: list[_Prompt], params: list[SamplingParams], *, is_shown: bool) -> list[RequestOutput]:
        for prompt, sampling in zip(pairs, params, strict=True):
            check_prompt(prompt.token_ids, self.config)
            check_sampling(sampling, self.config, max_logprobs=self.config.max_logprobs)
            if sampling.structured_outputs is not None:
                self._grammars.check(sampling.structured_outputs)
        if self.core.fault is not None:
            raise EngineDead(self.core.fault)
        opened = [self._open(prompt, sampling) for prompt, sampling in zip(pairs, params, strict=True)]
        try:
            return self._collect(opened, is_shown=is_shown)
        finally:
            self._leave(opened)

    def _open(self, prompt: _Prompt, sampling: SamplingParams) -> OpenRequest:
        opened, requests = self._processor.open(
            str(next(self._ids)),
            prompt.token_ids,
            sampling,
            prompt=prompt.text,
            eos_token_ids=self._eos_token_ids,
            arrival_s=self._clock.now_s(),
            cache_salt=prompt.cache_salt,
        )
        for request in requests:
            self.core.send(request)
        return opened

    def _collect(self, opened: Sequence[OpenRequest], *, is_shown: bool) -> list[RequestOutput]:
        """Turn the engine until every request has ended."""
        wholes = {id(request): request.empty_output() for request in opened}
        num_open = len(opened)
        with progress_bar("generating", unit="requests", is_shown=is_shown) as progress:
            while num_open:
                for request, delta in self._turn():
                    wholes[id(request)].add(delta)
                    num_open -= delta.finished
                progress(len(opened) - num_open, len(opened))
                if self.core.fault is not None:
                    raise EngineDead(self.core.fault)
        return [wholes[id(request)] for request in opened]

    def _turn(self) -> Iterable[tuple[OpenRequest, RequestOutput]]:
        done = self._processor.process(self.core.turn(), self._clock.now_s())
        if done.stopped_ids and self.core.fault is None:
            self.core.send(AbortRequests(request_ids=tuple(done.stopped_ids), reason=FinishReason.STOP))
        return done.deltas

    def _leave(self, opened: Sequence[OpenRequest]) -> None:
        """Whatever happened, nothing of these requests stays behind: abort what runs and let the last step run out."""
        left = [engine_id for request in opened for engine_id in self._processor.close(request)]
        if self.core.fault is not None:
            return
        if left:
            self.core.send(AbortRequests(request_ids=tuple(left)))
        while self.core.has_work and self.core.fault is None:
            self._turn()


def _as_list(prompts: Any) -> list[Any]:
    """One prompt is a list of one; a flat list of token ids is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = _listed(prompts)
    return [listed] if listed and isinstance(listed[0], int | np.integer) else listed


def _as_ids(prompt: Any) -> list[int]:
    ids = _listed(prompt)
    return [int(t) if isinstance(t, np.integer) else t for t in ids]


def _listed(values: Any) -> list[Any]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise RequestError(f"a prompt is text, token ids or a mapping, got {values!r}", param="prompt")
    # tolist: arrays and tensors give Python integers that way.
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one, or one each", param="sampling_params")
    return list(params)
