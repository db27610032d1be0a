# SPDX-License-Identifier: Apache-2.0
"""A queue of requests in order of arrival, with removal from the middle at constant cost (aborts).

Running and waiting requests are one order cut in two: whoever runs arrived before whoever waits. Admission takes the front of the waiting
queue, preemption moves the newest running request back to that front; so the order holds for ever and the oldest is never preempted.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from whalefall.runtime.scheduler.state import RequestState


class RequestQueue:
    def __init__(self) -> None:
        self._states: OrderedDict[str, RequestState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def __bool__(self) -> bool:
        return bool(self._states)

    def snapshot(self) -> list[RequestState]:
        """The requests, oldest first, as a copy: the queue may change under a loop over it."""
        return list(self._states.values())

    def first(self, count: int) -> list[RequestState]:
        """The oldest `count` requests."""
        return list(islice(self._states.values(), count))

    @property
    def oldest(self) -> RequestState:
        return next(iter(self._states.values()))

    @property
    def newest(self) -> RequestState:
        return next(reversed(self._states.values()))

    def push_newest(self, state: RequestState) -> None:
        assert state.request_id not in self._states
        self._states[state.request_id] = state

    def push_oldest(self, state: RequestState) -> None:
        self.push_newest(state)
        self._states.move_to_end(state.request_id, last=False)

    def remove(self, state: RequestState) -> None:
        removed = self._states.pop(state.request_id)
        assert removed is state
