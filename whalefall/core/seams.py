# SPDX-License-Identifier: Apache-2.0
"""The protocols at the seams of the house, with the implementation for one rank."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from whalefall.core.batch import CacheTensors, DraftRequests, Drafts

if TYPE_CHECKING:  # naming a tensor must not cost the seconds that importing torch takes
    from torch import Tensor


class Comm(Protocol):
    """Collectives of one axis of ranks. Layers call them in forward order; every rank makes the same calls."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of x over the ranks; may reuse x's memory."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' x joined along dim, in rank order."""
        ...


class LocalComm:
    """One rank: sums and joins are the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x


class Clock(Protocol):
    """Time enters the engine from outside."""

    def now_s(self) -> float: ...


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()


class Drafter(Protocol):
    """Guesses the next tokens of requests; the target model then judges all of them in one step.

    In each step, on the step loop's thread and on one stream:

        forward     the model processes rows: real ones, and rows of drafts that may be refused. A drafter with state of its own is fed in
                    here: the family's `forward` hands it what it needs of every decoder row (hidden states of some layers), and it
                    keeps that in rings of the same CacheSpec, written with the same row sets
        sample      one to k + 1 tokens per request are accepted and stand in the token table
        draft       once, for the requests that drew a token; the drafts are rows of their next step

    Nothing is ever rolled back by a call. Rows of refused drafts are simply overwritten: ring rows carry their absolute position
    (`layers/window.RingStep`), the next step writes the same positions again before anybody reads them, and a ring has
    window + BuildContext.max_draft_tokens rows, so that refused rows never push out one that is still seen. `draft` itself leaves no
    trace in any ring; rows of the draft block live only in its own tensors.

    A drafter may be wrong as often as it likes: tokens, log-probabilities and caches are those of the target model alone. It must not
    read anything of a request beyond `position_R`, and row r of its answer must depend on nothing but row r.
    """

    @property
    def max_draft_tokens(self) -> int:
        """The largest k it can do (of a trained block: its length)."""
        ...

    def draft(self, requests: DraftRequests, cache: CacheTensors, k: int) -> Drafts:
        """Up to k tokens to follow each request's latest one.

        Args:
            k: 1 <= k <= max_draft_tokens, the same in every call of a run unless the engine adapts it.
        """
        ...
