# SPDX-License-Identifier: Apache-2.0
"""When requests are sent: at a rate (Poisson or burstier), with a bound on how many are under way, or all at once."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from whalefall.bench.openai import Ask
from whalefall.bench.records import Record

T = TypeVar("T")


class Pace(Protocol):
    """Time for the load generator; tests bring their own."""

    def now_s(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class RealPace:
    def now_s(self) -> float:
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def arrival_times(count: int, rate_per_s: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which to send, ascending.

    Gaps are gamma distributed with mean 1 / rate; burstiness 1 makes the arrivals Poisson, below 1 burstier, above 1 more even.
    An infinite rate sends everything at once.
    """
    if math.isinf(rate_per_s):
        return [0.0] * count
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate_per_s * burstiness))
    return times


async def run_load(
    asks: Sequence[Ask],
    send: Callable[[Ask], Awaitable[Record]],
    times_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    pace: Pace | None = None,
    on_done: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Send each ask at its time, in order; a request that must wait for a place is sent, and measured from, when it gets one.

    Times count from one start, so that a late request does not push back those after it.
    """
    pace = pace or RealPace()
    gate = asyncio.Semaphore(max_concurrency or len(asks) or 1)
    start_s = pace.now_s()

    async def one(ask: Ask) -> Record:
        try:
            record = await send(ask)
        finally:
            gate.release()
        if on_done:
            on_done(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = []
        for ask, at_s in zip(asks, times_s, strict=True):
            delay = start_s + at_s - pace.now_s()
            if delay > 0:
                await pace.sleep(delay)
            await gate.acquire()
            tasks.append(group.create_task(one(ask)))
    return [task.result() for task in tasks]
