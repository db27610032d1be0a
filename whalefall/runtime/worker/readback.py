# SPDX-License-Identifier: Apache-2.0
"""Readback: a step's results on their way to the host, behind the step's own work and before the next step's.

Reading a device tensor waits for everything queued so far, the step launched ahead included. So the copies are queued at launch, into
pinned memory, with an event behind them; who reads waits for that event alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Readback:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Queue the copies. On a CPU there is nothing to copy."""
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if any(tensor.is_cuda for tensor in tensors):
            self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
