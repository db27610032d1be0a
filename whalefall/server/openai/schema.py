# SPDX-License-Identifier: Apache-2.0
"""What a client may send to /v1/chat/completions and /v1/completions, and how it becomes `SamplingParams`.

Types are strict ("2" is not a number), null means absent, unknown fields are ignored. Ranges are checked by `SamplingParams` itself. Beside
OpenAI's fields these of vLLM work: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids, include_stop_str_in_output,
skip_special_tokens, prompt_logprobs, add_special_tokens, return_token_ids, chat_template_kwargs, stream_options.continuous_usage_stats.
cache_salt. Our own: parse_special_tokens, use_prefix_cache. The shape of an answer (response_format, structured_outputs, guided_*) is read
in structure.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from whalefall.core.errors import BadSampling, RequestError
from whalefall.core.sampling import SamplingParams
from whalefall.core.structure import StructuredSpec
from whalefall.server.openai.structure import STRUCTURE_FIELDS, UNSUPPORTED_FIELDS, read_structure

MAX_STOPS = 16


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    """One last chunk with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk."""


class GenerationRequest(BaseModel):
    """The fields both endpoints share."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Any = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    """Prefix hits only among requests of equal salt: what one tenant sent cannot be found out by another."""
    use_prefix_cache: bool | None = None
    """False: compute the whole prompt, whatever is known of it."""
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: Any = None
    structural_tag: Any = None

    @field_validator("stop")
    @classmethod
    def _read_stop(cls, value: Any) -> list[str]:
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise ValueError(f"stop must be a string or a list of strings, got {_short(value)}")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"stop may hold up to {MAX_STOPS} strings, got {len(stops)}")
        if not all(stops):
            raise ValueError("stop must not hold an empty string")
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _read_logit_bias(cls, value: Any) -> dict[int, float]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ValueError(f"logit_bias must be an object of token ids and numbers, got {_short(value)}")
        return {_token_id(key): bias for key, bias in value.items()}

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_missing(cls, body: Any) -> Any:
        if body.get("use_beam_search"):
            refuse("use_beam_search", "beam search is not supported")
        return body

    @model_validator(mode="after")
    def _check_together(self) -> GenerationRequest:
        if self.cache_salt == "":
            refuse("cache_salt", "cache_salt must not be empty; leave it out for none")
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "stream_options needs stream: true")
        if self.stream and self.prompt_logprobs is not None:
            refuse("prompt_logprobs", "prompt_logprobs cannot be streamed: ask without stream")
        return self

    @property
    def structure(self) -> StructuredSpec | None:
        """The shape the answer must have. Raises RequestError where it is badly said."""
        return read_structure({name: getattr(self, name) for name in (*STRUCTURE_FIELDS, *UNSUPPORTED_FIELDS)})

    @property
    def cache_use(self) -> dict[str, Any]:
        """How the engine may use its prefix cache for this request."""
        return {"cache_salt": self.cache_salt or "", "use_prefix_cache": self.use_prefix_cache is not False}

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def sampling(self, max_logprobs: int, **chosen: Any) -> SamplingParams:
        """The parameters of the engine; `chosen` are those the endpoint decides itself, over what the client gave."""
        names = (
            *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output"),
            *("ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "skip_special_tokens"),
            "prompt_logprobs",
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        merged = {**given, **chosen}
        for name in ("logprobs", "prompt_logprobs"):
            check_logprobs(merged.get(name), name, max_logprobs)
        return SamplingParams(**merged)

    def chat_sampling(self, max_logprobs: int, limit: int, structure: StructuredSpec | None, **chosen: Any) -> SamplingParams:
        """Of a conversation: the parser looks for stop strings and must see its markers; the others are left out behind it."""
        fixed: dict[str, Any] = {"stop": (), "include_stop_str_in_output": False, "skip_special_tokens": False}
        return self.sampling(max_logprobs, **{**fixed, "max_tokens": limit, "structured_outputs": structure, **chosen})


def check_logprobs(value: int | None, name: str, limit: int) -> None:
    """limit -1: any number, and -1 for the whole vocabulary."""
    if value is not None and not (0 <= value <= limit or (limit < 0 and value >= -1)):
        raise BadSampling(f"{name} must be in [0, {limit}] (max_logprobs), got {value}", param=name)


class ChatRequest(GenerationRequest):
    """The conversation itself (messages, tools, tool_choice, thinking, reasoning_effort) is checked by the chat codec."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            refuse("top_logprobs", "top_logprobs needs logprobs: true")
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            refuse("max_completion_tokens", f"max_completion_tokens must be at least 1, got {self.max_completion_tokens}")
        if self.max_tokens is not None and self.max_tokens < 1:
            refuse("max_tokens", f"max_tokens must be at least 1, got {self.max_tokens}")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    prompt: Any = None
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    """Begin the prompt with the begin-of-sequence token if the model has one; true unless said otherwise."""
    parse_special_tokens: bool | None = None
    """Control tokens spelled in the prompt mean those tokens; true unless said otherwise."""

    @field_validator("prompt")
    @classmethod
    def _read_prompt(cls, value: Any) -> list[str] | list[list[int]]:
        """Always a list of prompts, all of them text or all of them ids."""
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if all(isinstance(item, str) for item in value):
                return value
            if _are_ids(value):
                return [value]
            if all(isinstance(item, list) and item and _are_ids(item) for item in value):
                return value
        raise ValueError(
            f"prompt must be a string, strings, token ids or lists of token ids, none of them empty lists, got {_short(value)}"
        )

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.prompt is None:
            refuse("prompt", "prompt is missing")
        if self.suffix not in (None, ""):
            refuse("suffix", "suffix is not supported: this server does not fill in the middle")
        if self.best_of is not None and self.best_of != self.num_choices:
            refuse("best_of", f"best_of must equal n ({self.num_choices}) or be absent, got {self.best_of}")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            refuse("max_tokens", "max_tokens is 0: nothing to do unless echo or prompt_logprobs asks to score the prompt")
        return self


def _token_id(key: Any) -> int:
    text = str(key)
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise ValueError(f"logit_bias must map token ids to numbers, got the key {_short(key)}")
    return int(text)


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int and 0 <= item < 2**31 for item in value)


def refuse(param: str, message: str) -> NoReturn:
    raise RequestError(message, param=param)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
