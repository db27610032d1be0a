# SPDX-License-Identifier: Apache-2.0
"""SamplingParams: what a request asks of the sampler. Names and meanings follow vLLM and the OpenAI API."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Self

from whalefall.core.errors import BadSampling
from whalefall.core.structure import StructuredSpec

MAX_LOGPROBS = 20
"""Most alternatives per token a client may ask for; -1 asks for the whole vocabulary (offline API)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose tokens, when to stop, and what to report.

    Raises:
        BadSampling: a value has the wrong type or lies outside its range; the message names the field, `param` holds it.
    """

    n: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    """0 is greedy; ties go to the lower token id."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; in (0, 1]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest; in [0, 1]."""
    seed: int | None = None
    """Same prompt, parameters and seed give the same tokens; None draws a fresh seed per request."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None means up to the context limit; 0 scores the prompt only (with prompt_logprobs)."""
    min_tokens: int = 0
    """End-of-sequence and stop ids cannot be chosen before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the generation; never part of the text unless include_stop_str_in_output."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the generation."""
    include_stop_str_in_output: bool = False
    """Keep the matched stop string at the end of the text."""
    ignore_eos: bool = False
    """Go on after end-of-sequence."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per earlier occurrence among the generated tokens; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; > 0."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these ids; in [-100, 100]. -100 forbids and 100 all but forces."""
    logprobs: int | None = None
    """Alternatives to report per generated token beside the chosen one; -1 for the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens. Such a request runs every row of the prompt and is never trimmed."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """False leaves the text empty; stop strings need True."""
    use_drafts: bool = True
    """False: one token per step for this request, even where the engine speculates. What is drawn is the same, only slower."""
    skip_reading_prefix_cache: bool | None = None
    """True computes every row of the prompt, whatever is cached; what it computes is offered to others all the same."""
    structured_outputs: StructuredSpec | None = None
    """The shape the answer must have: `StructuredOutputsParams(json=..., regex=..., choice=..., grammar=..., json_object=True)`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        self._check_types()
        self._check_ranges()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def for_choice(self, index: int, seed: int) -> Self:
        """The parameters of choice `index` of n, with its own resolved seed."""
        return replace(self, n=1, seed=(seed + 0x9E3779B97F4A7C15 * index) % 2**64)

    def _check_types(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            kind = f.type if isinstance(f.type, str) else str(f.type)
            if value is None and "None" in kind:
                continue
            if kind.startswith("int") and (not isinstance(value, int) or isinstance(value, bool)):
                raise BadSampling(f"{f.name} must be an integer, got {value!r}", param=f.name)
            if kind.startswith("float"):
                if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                    raise BadSampling(f"{f.name} must be a finite number, got {value!r}", param=f.name)
                object.__setattr__(self, f.name, float(value))
            if kind.startswith("bool") and not isinstance(value, bool):
                raise BadSampling(f"{f.name} must be true or false, got {value!r}", param=f.name)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredSpec):
            raise BadSampling(
                f"structured_outputs must come from StructuredOutputsParams(...), got {self.structured_outputs!r}",
                param="structured_outputs",
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise BadSampling(f"stop must hold non-empty strings, got {text!r}", param="stop")
        for token_id in self.stop_token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise BadSampling(f"stop_token_ids must hold token ids, got {token_id!r}", param="stop_token_ids")
        for token_id, bias in self.logit_bias.items():
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise BadSampling(f"logit_bias must map token ids to numbers, got the key {token_id!r}", param="logit_bias")
            if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
                raise BadSampling(f"logit_bias values must lie in [-100, 100], got {bias!r}", param="logit_bias")

    def _check_ranges(self) -> None:
        self._require(self.n >= 1, "n", "at least 1")
        self._require(0 <= self.temperature <= 2, "temperature", "in [0, 2]")
        self._require(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        self._require(self.top_k >= -1, "top_k", "-1, 0 (both: no limit) or positive")
        self._require(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        self._require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "0 or more")
        self._require(self.min_tokens >= 0, "min_tokens", "0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadSampling(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}", param="min_tokens")
        self._require(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]")
        self._require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]")
        self._require(self.repetition_penalty > 0, "repetition_penalty", "positive")
        self._require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        self._require(self.logprobs is None or self.logprobs >= -1, "logprobs", "-1 (whole vocabulary), 0 or more")
        self._require(self.prompt_logprobs is None or self.prompt_logprobs >= -1, "prompt_logprobs", "-1 (whole vocabulary), 0 or more")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise BadSampling("max_tokens is 0: nothing to do unless prompt_logprobs asks to score the prompt", param="max_tokens")
        if self.stop and not self.detokenize:
            raise BadSampling("stop strings need detokenize=True", param="stop")

    def _require(self, holds: bool, name: str, allowed: str) -> None:
        if not holds:
            raise BadSampling(f"{name} must be {allowed}, got {getattr(self, name)!r}", param=name)
