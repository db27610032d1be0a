# SPDX-License-Identifier: Apache-2.0
"""A request as the engine knows it: token ids and sampling, no text. Plain data that may cross a process border.

Way of a request: the front makes an `EngineRequest`, the scheduler answers with `RequestUpdate`s until one carries a finish reason.
Each request ends exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from whalefall.core.sampling import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    """End of sequence, a stop id or a stop string."""
    LENGTH = "length"
    """max_tokens or the context limit."""
    ABORT = "abort"
    """The client left or asked to stop."""
    ERROR = "error"
    """A fault of this request or of the engine; `RequestUpdate.error` says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """What the front sends to the engine for one completion (n is already unrolled)."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    """n == 1 and seed is resolved to an integer."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end the generation unless ignore_eos."""
    arrival_s: float = 0.0
    """Clock of the engine host at arrival, seconds."""
    cache_salt: str = ""
    """Prefix hits only among requests of equal salt."""
    use_prefix_cache: bool = True
    """False: compute every row, whatever is known of the prompt already. What it computes is offered to others all the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetPrefixCache:
    """Ask the engine to forget all cached prefixes. Requests that run go on with what they hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortRequests:
    """Ask the engine to drop these requests; unknown ids are ignored."""

    request_ids: tuple[str, ...]
    reason: FinishReason = FinishReason.ABORT
    """STOP when the front has seen a stop string: a normal end, reported as such."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the target model at one position, natural logarithm."""

    token_id: int
    """The token chosen (or given, in a prompt) at this position."""
    logprob: float
    rank: int
    """1 = the likeliest."""
    top_ids: npt.NDArray[np.int32] | None
    """[k], falling probability; None when the whole vocabulary is meant, in id order."""
    top_logprobs: npt.NDArray[np.float32]
    """[k], or [V] when top_ids is None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTimings:
    """Seconds on the engine's clock."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_s: tuple[float, ...] = ()
    """When each output token was committed; filled in the final update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestUpdate:
    """What one step did for one request."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per new token when asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """For prompt positions first_prompt_position..., when asked for; position 0 has none."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop id that ended it, when it was not end-of-sequence."""
    error: str | None = None
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache when the request first ran; replayed rows among them count too."""
    timings: RequestTimings | None = field(default=None)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
