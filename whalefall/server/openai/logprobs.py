# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in the forms of the OpenAI API. JSON knows no infinity: a token that could not be drawn has -9999.0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

FLOOR = -9999.0
"""Stands for minus infinity, as in vLLM."""

Alternatives = Mapping[int, Any]
"""Token id -> object with logprob and rank: the chosen token and its rivals (`engine.outputs.Logprob`)."""


class TokenNames(Protocol):
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes | None: ...


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR


def chat_entry(names: TokenNames, token_id: int, alternatives: Alternatives, num_top: int) -> dict[str, Any]:
    """One element of `choices[].logprobs.content`."""
    top = _likeliest_first(alternatives)[:num_top]
    entry = _token(names, token_id, alternatives[token_id].logprob)
    entry["top_logprobs"] = [_token(names, rival, value.logprob) for rival, value in top]
    return entry


def _token(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    data = names.token_bytes(token_id)
    return {"token": names.token_text(token_id), "logprob": finite(logprob), "bytes": None if data is None else list(data)}


@dataclass(slots=True)
class CompletionLogprobs:
    """The `logprobs` object of a completion, growing token by token."""

    names: TokenNames
    num_top: int
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    offset: int = 0

    def add(self, token_id: int, alternatives: Alternatives | None, text_length: int) -> None:
        """
        Args:
            alternatives: None for the first token of a prompt, which nothing predicts.
            text_length: letters that this token added to the text.
        """
        self.tokens.append(_label(self.names, token_id))
        self.text_offset.append(self.offset)
        self.offset += text_length
        if alternatives is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(finite(alternatives[token_id].logprob))
        ranked = enumerate(_likeliest_first(alternatives))
        shown = [(rival, value) for place, (rival, value) in ranked if place < self.num_top or rival == token_id]
        self.top_logprobs.append({_label(self.names, rival): finite(value.logprob) for rival, value in shown})

    def take(self) -> dict[str, Any] | None:
        """What was added since the last call, in the API's form; None when nothing was."""
        if not self.tokens:
            return None
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        taken = {name: getattr(self, name) for name in names}
        for name in names:
            setattr(self, name, [])
        return taken


def prompt_entries(names: TokenNames, prompt_logprobs: Sequence[Alternatives | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token null (the first) or {id: {logprob, rank, decoded_token}}."""
    return [
        None
        if alternatives is None
        else {
            str(token_id): {"logprob": finite(value.logprob), "rank": value.rank, "decoded_token": names.token_text(token_id)}
            for token_id, value in alternatives.items()
        }
        for alternatives in prompt_logprobs
    ]


def _likeliest_first(alternatives: Alternatives) -> list[tuple[int, Any]]:
    """The engine puts the chosen token first and then the likeliest; equal ones keep that order."""
    return sorted(alternatives.items(), key=lambda item: -item[1].logprob)


def _label(names: TokenNames, token_id: int) -> str:
    r"""A token's text; a part of a character as `bytes:\xe2\x80`, so that two such tokens stay apart as keys."""
    text = names.token_text(token_id)
    data = names.token_bytes(token_id) if "\ufffd" in text else None
    return text if data is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
