# SPDX-License-Identifier: Apache-2.0
"""What the client saw of one request: when it was sent, when tokens came, how it ended. Plain data, seconds of one clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

CountedBy = Literal["token_ids", "logprobs", "continuous_usage", "usage", "chunks"]
"""How the tokens of a chunk were counted, the exact ways first. "usage" knows the total and spreads it over chunks by their text;
"chunks" knows nothing and counts one token a chunk."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One chunk that carried output."""

    at_s: float
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    sent_s: float
    ended_s: float
    """When the stream ended, or failed."""
    arrivals: tuple[Arrival, ...] = ()
    prompt_tokens: int | None = None
    """As the server's usage says; None when it gave none."""
    cached_tokens: int | None = None
    counted_by: CountedBy = "chunks"
    finish_reason: str | None = None
    error: str | None = None
    text: str = field(default="", repr=False)
    token_ids: tuple[int, ...] | None = field(default=None, repr=False)
    """The output's ids, when the server gave them."""
    label: str = ""
    """Which mix or session the request belongs to."""

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def output_tokens(self) -> int:
        return sum(a.tokens for a in self.arrivals)
