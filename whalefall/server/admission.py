# SPDX-License-Identifier: Apache-2.0
"""Who may enter: a bounded queue of requests and prompt tokens, and a wait that is told from the measured rate.

`Gatekeeper.admit` stands in front of an engine: its `generate` counts a request as waiting from the call to its first output. A full queue
refuses with `Busy`, whose Retry-After is the time that the waiting tokens take at the rate at which others lately left the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import ContextVar
from typing import Any

from whalefall.core.errors import Busy
from whalefall.core.sampling import SamplingParams
from whalefall.server.config import ServerConfig
from whalefall.server.errors import RateLimited

MAX_RETRY_AFTER_S = 600.0
_MEMORY_S = 60.0
"""The rate is an average over about so much time in which somebody waited."""
caller: ContextVar[str] = ContextVar("caller", default="")
"""Whose request the current task serves: the API key, or nothing where there are no keys."""


class Backlog:
    """Requests and prompt tokens that wait for their first output, and how fast they leave. Reads no clock."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._tokens_left = 0.0
        self._busy_s = 0.0
        self._since_s = 0.0

    def enter(self, num_tokens: int, now_s: float) -> None:
        if self.num_requests == 0:
            self._since_s = now_s  # idle time says nothing about the rate
        self.num_requests += 1
        self.num_tokens += num_tokens

    def leave(self, num_tokens: int, now_s: float, *, was_served: bool) -> None:
        """
        Args:
            was_served: False for a reader that left before: it says nothing about the rate.
        """
        self.num_requests -= 1
        self.num_tokens -= num_tokens
        if was_served:
            elapsed_s = max(0.0, now_s - self._since_s)
            kept = max(0.0, 1.0 - elapsed_s / _MEMORY_S)
            self._tokens_left = self._tokens_left * kept + num_tokens
            self._busy_s = self._busy_s * kept + elapsed_s
            self._since_s = now_s

    @property
    def tokens_per_s(self) -> float | None:
        """None before anything has been measured."""
        return self._tokens_left / self._busy_s if self._busy_s > 0 else None

    @property
    def wait_s(self) -> float:
        """How long what waits now will take; 1 s before anything has been measured."""
        rate = self.tokens_per_s
        return min(MAX_RETRY_AFTER_S, max(1.0, self.num_tokens / rate)) if rate else 1.0


class Allowance:
    """A bucket that fills evenly and holds one minute's worth. Something may be taken while it is not empty, also more than is left."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self._per_minute = per_minute
        self._left = per_minute
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Until something may be taken; 0: now."""
        self._left = min(self._per_minute, self._left + (now_s - self._at_s) * self._per_minute / 60)
        self._at_s = now_s
        return max(0.0, (1.0 - self._left) * 60 / self._per_minute)

    def take(self, amount: float) -> None:
        self._left -= amount


class Gatekeeper:
    def __init__(self, config: ServerConfig, clock: Callable[[], float]) -> None:
        self.backlog = Backlog()
        self.num_refused = 0
        """Since start: for want of room."""
        self.num_limited = 0
        """Since start: callers beyond their allowance."""
        self._config = config
        self._clock = clock
        self._allowances: dict[tuple[str, str], Allowance] = {}

    def now_s(self) -> float:
        return self._clock()

    def check(self, num_tokens: int) -> None:
        """
        Raises:
            Busy: the queue is full. An empty queue takes any prompt: what fits the context must be able to run.
            RateLimited: this caller has used up the allowance of this minute.
        """
        for what, limit in (("requests", self._config.max_requests_per_minute), ("tokens", self._config.max_tokens_per_minute)):
            if limit is not None and (wait_s := self._allowance(what, limit).wait_s(self._clock())) > 0:
                self.num_limited += 1
                raise RateLimited(f"this API key has used its {limit:,} {what} per minute", retry_after_s=wait_s)
        waiting, config = self.backlog, self._config
        if config.max_num_queued_reqs is not None and waiting.num_requests >= config.max_num_queued_reqs:
            self._refuse(f"{waiting.num_requests:,} requests wait already, limit {config.max_num_queued_reqs:,} (max_num_queued_reqs)")
        limit_tokens = config.max_num_queued_tokens
        if limit_tokens is not None and waiting.num_requests and waiting.num_tokens + num_tokens > limit_tokens:
            waits = f"{waiting.num_tokens:,} prompt tokens wait already"
            self._refuse(f"{waits}, with {num_tokens:,} more the limit is {limit_tokens:,} (max_num_queued_tokens)")

    def charge(self, *, num_requests: int = 0, num_tokens: int = 0) -> None:
        for what, limit, amount in (
            ("requests", self._config.max_requests_per_minute, num_requests),
            ("tokens", self._config.max_tokens_per_minute, num_tokens),
        ):
            if limit is not None:
                self._allowance(what, limit).take(amount)

    def admit(self, engine: Any) -> AdmittedEngine:
        return AdmittedEngine(engine, self, self._config.request_timeout_s)

    def _allowance(self, what: str, limit: int) -> Allowance:
        key = (caller.get(), what)
        if key not in self._allowances:
            self._allowances[key] = Allowance(limit, self._clock())
        return self._allowances[key]

    def _refuse(self, message: str) -> None:
        self.num_refused += 1
        raise Busy(message, retry_after_s=self.backlog.wait_s)


class AdmittedEngine:
    """The engine as one HTTP request sees it: everything is the engine's own but `generate`."""

    def __init__(self, engine: Any, gate: Gatekeeper, timeout_s: float | None) -> None:
        self._engine = engine
        self._gate = gate
        self._timeout_s = timeout_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, request_id: str, **more: Any
    ) -> AsyncGenerator[Any, None]:
        """As the engine's.

        Raises:
            Busy, RateLimited: before the engine has heard of it; or Busy when its time was over before its first token.
        """
        gate, num_tokens = self._gate, len(prompt_token_ids)
        gate.check(num_tokens)
        gate.charge(num_requests=1, num_tokens=num_tokens)
        gate.backlog.enter(num_tokens, gate.now_s())
        is_waiting, late = True, _Deadline(self._engine, request_id, self._timeout_s)
        outputs = self._engine.generate(prompt_token_ids, sampling, request_id, **more)
        try:
            async for output in outputs:
                if is_waiting:
                    is_waiting = False
                    gate.backlog.leave(num_tokens, gate.now_s(), was_served=not late.has_passed)
                    if late.has_passed:
                        raise Busy(f"no answer within {self._timeout_s:g} s (request_timeout_s)", retry_after_s=gate.backlog.wait_s)
                gate.charge(num_tokens=sum(len(choice.token_ids) for choice in output.outputs))
                yield output
        finally:
            late.cancel()
            if is_waiting:
                gate.backlog.leave(num_tokens, gate.now_s(), was_served=False)
            await outputs.aclose()


class _Deadline:
    """Aborts a request in the engine when its time is over; costs nothing per token."""

    def __init__(self, engine: Any, request_id: str, timeout_s: float | None) -> None:
        self.has_passed = False
        self._engine = engine
        self._request_id = request_id
        self._task: asyncio.Task[None] | None = None
        self._timer = None if timeout_s is None else asyncio.get_running_loop().call_later(timeout_s, self._pass)

    def _pass(self) -> None:
        self.has_passed = True
        self._task = asyncio.get_running_loop().create_task(self._engine.abort(self._request_id))

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
