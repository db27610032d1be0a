# SPDX-License-Identifier: Apache-2.0
"""EngineClient: an engine as its front sees it, wherever it runs. ThreadEngine runs it in a thread of this process.

supervisor.py has the other one, which runs it in a process of its own. Way of a client: `start` once, in the event loop; then `send`,
from that loop; updates come back through `deliver`, in that loop too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from whalefall.core.errors import EngineDead
from whalefall.core.request import AbortRequests, EngineRequest, RequestUpdate, ResetPrefixCache
from whalefall.observe.log import get_logger
from whalefall.observe.metrics import EngineGauges

if TYPE_CHECKING:  # the API process has no core, and is spared the importing of all that is below it
    from whalefall.engine.core import EngineCore

log = get_logger(__name__)
Message: TypeAlias = EngineRequest | AbortRequests | ResetPrefixCache
Deliver: TypeAlias = Callable[[list[RequestUpdate]], None]


class EngineClient(Protocol):
    @property
    def fault(self) -> str | None:
        """Why no request will ever run again; None while that may still happen."""
        ...

    @property
    def is_ready(self) -> bool:
        """A request would run now."""
        ...

    @property
    def retry_after_s(self) -> float:
        """While not ready: a guess of how long that lasts."""
        ...

    @property
    def gauges(self) -> EngineGauges: ...

    @property
    def num_restarts(self) -> int: ...

    def start(self, deliver: Deliver) -> None:
        """Once, from the running event loop."""
        ...

    def check(self) -> None:
        """
        Raises:
            EngineDead: `fault` says why.
            Busy: not ready, for a while.
        """
        ...

    def send(self, message: Message) -> None:
        """
        Raises:
            as `check`.
        """
        ...

    async def shutdown(self) -> None:
        """End what is open with reason "abort", then the engine; all updates have been delivered when this returns."""
        ...


class ThreadEngine:
    """The step loop in a thread of this process. It starts with the first request, and when it has ended by a fault it stays so."""

    num_restarts = 0
    retry_after_s = 1.0

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._deliver: Deliver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    @property
    def fault(self) -> str | None:
        return self.core.fault or ("the engine was shut down" if self._is_stopped else None)

    @property
    def is_ready(self) -> bool:
        return self.fault is None

    @property
    def gauges(self) -> EngineGauges:
        return self.core.gauges

    def start(self, deliver: Deliver) -> None:
        """May be called again from another event loop, when nothing is open."""
        self._loop, self._deliver = asyncio.get_running_loop(), deliver
        if self._thread is None:
            self._thread = threading.Thread(target=self.core.run, args=(self._post,), name="whalefall-steps", daemon=True)
            self._thread.start()

    def check(self) -> None:
        if self.fault is not None:
            raise EngineDead(self.fault)

    def send(self, message: Message) -> None:
        self.core.send(message)

    async def shutdown(self) -> None:
        self._is_stopped = True
        self.core.stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _post(self, updates: list[RequestUpdate]) -> None:
        """From the engine's thread to the event loop's."""
        assert self._loop is not None and self._deliver is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, updates)
        except RuntimeError:
            log.warning("the event loop is closed: %d updates have no reader", len(updates))
