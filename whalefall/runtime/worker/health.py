# SPDX-License-Identifier: Apache-2.0
"""Counters by which a model says that the bookkeeping around it has a fault: 0 in health, rising since the model was built.

They live on the device. On a CPU they are read when a step is done. On a GPU each step starts one small copy behind its own work into
pinned memory, which is there once the step's ids have been read: nothing waits for it. In debug a rise ends the step with an error; else
the model has made the fault harmless (a masked key), the number is published, and the log says so once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.models.definition import Model, Watched
from whalefall.observe.log import get_logger

log = get_logger(__name__)


class HealthProbe:
    """One per worker."""

    def __init__(self, model: Model, *, is_debug: bool = False) -> None:
        counters = dict(model.health_counters()) if isinstance(model, Watched) else {}
        self._names = tuple(counters)
        self._counters: list[Tensor] = list(counters.values())
        self._is_debug = is_debug
        self._copy_N: Tensor | None = None
        if self._counters and self._counters[0].is_cuda:
            self._copy_N = torch.zeros(len(self._names), dtype=torch.int64, pin_memory=True)
        self._last = dict.fromkeys(self._names, 0)
        self._told: set[str] = set()
        self._last.update((name, int(counter)) for name, counter in counters.items())

    def after_launch(self) -> None:
        """The step's work is queued: queue the copy behind it."""
        if self._copy_N is not None:
            self._copy_N.copy_(torch.stack(self._counters), non_blocking=True)

    def read(self, step_id: int) -> dict[str, int]:
        """The counters, once the step's ids have been read. One step ahead they may already hold the next step's.

        Raises:
            RuntimeError: in debug, when one has risen.
        """
        values = [int(c) for c in self._counters] if self._copy_N is None else self._copy_N.tolist()
        now = dict(zip(self._names, values, strict=True))
        risen = {name: value - self._last[name] for name, value in now.items() if value > self._last[name]}
        self._last = now
        for name, count in risen.items():
            if self._is_debug:
                raise RuntimeError(f"{name} rose by {count} to {now[name]} by step {step_id}: the cache bookkeeping has a fault")
            if name not in self._told:
                self._told.add(name)
                log.error(
                    "%s rose by %d by step %d: some answers may be a little worse than they should be; please report it",
                    name,
                    count,
                    step_id,
                )
        return now
