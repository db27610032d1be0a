# SPDX-License-Identifier: Apache-2.0
"""The protocols at the seams of the house, with the implementation for one rank."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

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
