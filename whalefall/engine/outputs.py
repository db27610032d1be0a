# SPDX-License-Identifier: Apache-2.0
"""What a user gets back, shaped as vLLM's users know it. The same types carry whole answers (LLM) and deltas (AsyncLLM).

A delta holds only what is new for the choices that moved; `RequestOutput.add` joins deltas to the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from whalefall.core.request import FinishReason, TokenLogprobs
from whalefall.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    """Natural logarithm; may be -inf."""
    rank: int | None = None
    """1 = the likeliest."""
    decoded_token: str | None = None
    """Text of the token alone; "" for an id without text."""


PositionLogprobs: TypeAlias = Mapping[int, Logprob]
"""Token id -> Logprob: the token itself first, then the alternatives, likeliest first."""


class VocabLogprobs(Mapping[int, Logprob]):
    """Every token of the vocabulary at one position. Entries are made when asked for; `values_V` is the cheap way to all of them."""

    def __init__(self, position: TokenLogprobs, tokenizer: Tokenizer) -> None:
        self._position = position
        self._tokenizer = tokenizer
        self.values_V = position.top_logprobs
        """float32 log-probabilities in id order."""
        self._ranks_V: npt.NDArray[np.int64] | None = None

    def __getitem__(self, token_id: int) -> Logprob:
        if not 0 <= token_id < len(self.values_V):
            raise KeyError(token_id)
        return Logprob(float(self.values_V[token_id]), int(self._ranks()[token_id]), self._tokenizer.token_text(token_id))

    def __iter__(self) -> Iterator[int]:
        chosen = self._position.token_id
        yield chosen
        for token_id in self._by_likelihood().tolist():
            if token_id != chosen:
                yield token_id

    def __len__(self) -> int:
        return len(self.values_V)

    def _by_likelihood(self) -> npt.NDArray[np.int64]:
        """Ids, likeliest first; equal values by id, as greedy decoding breaks ties."""
        return np.argsort(-self.values_V, kind="stable")

    def _ranks(self) -> npt.NDArray[np.int64]:
        if self._ranks_V is None:
            self._ranks_V = np.empty(len(self.values_V), dtype=np.int64)
            self._ranks_V[self._by_likelihood()] = np.arange(1, len(self.values_V) + 1)
        return self._ranks_V


def position_logprobs(position: TokenLogprobs, tokenizer: Tokenizer) -> PositionLogprobs:
    if position.top_ids is None:
        return VocabLogprobs(position, tokenizer)
    text = tokenizer.token_text
    entries = {position.token_id: Logprob(position.logprob, position.rank, text(position.token_id))}
    for i, (token_id, value) in enumerate(zip(position.top_ids.tolist(), position.top_logprobs.tolist(), strict=True)):
        entries.setdefault(token_id, Logprob(value, i + 1, text(token_id)))
    return entries


@dataclass(slots=True)
class CompletionOutput:
    index: int
    """Which of the n choices."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """With the token that ended it; nothing after a stop string is in here."""
    cumulative_logprob: float | None = None
    """Sum over all tokens so far, when logprobs were asked for."""
    logprobs: list[PositionLogprobs] | None = None
    """One per token id, when asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop id that ended it; None for end-of-sequence and every other reason."""
    token_texts: list[str] = field(default_factory=list)
    """One per token id: the text that became certain with it. Joined they are `text`."""

    def finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, delta: CompletionOutput) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.token_texts += delta.token_texts
        self.cumulative_logprob = delta.cumulative_logprob
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on the engine's monotonic clock."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    token_times: list[list[float]] = field(default_factory=list)
    """Per choice: when each of its tokens was there."""

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    """None when the prompt came as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One per prompt token, None for the first; in a stream it comes whole, once, as soon as it is complete."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    """All n choices have ended."""
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    error: str | None = None
    """What went wrong, when a choice ended with reason "error"."""

    def add(self, delta: RequestOutput) -> None:
        """Join a later delta of the same request."""
        by_index = {output.index: output for output in self.outputs}
        for moved in delta.outputs:
            by_index.setdefault(moved.index, CompletionOutput(moved.index)).add(moved)
        self.outputs = [by_index[index] for index in sorted(by_index)]
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finished = delta.finished
        self.metrics = delta.metrics
        self.num_cached_tokens = delta.num_cached_tokens
        self.error = self.error or delta.error
