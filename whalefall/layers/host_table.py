# SPDX-License-Identifier: Apache-2.0
"""pinned_view: a table that stays in host memory and is read by the GPU, row by row, over the bus.

A lookup table of many gigabytes of which a token touches a few rows has no place in device memory. Its pages are pinned and mapped into the
device's address space, so a gather kernel reads exactly the rows it needs, with no copy and no synchronisation.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from whalefall.core.errors import ConfigError

_REGISTER_MAPPED = 2
"""cudaHostRegisterMapped."""


class _Bytes:
    """Host memory as the CUDA array interface describes it: torch then makes a device tensor of it without a copy."""

    def __init__(self, host: Tensor) -> None:
        self.host = host  # the memory must outlive the view; torch keeps this object alive
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (host.numel(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


def pinned_view(table: Tensor, device: torch.device) -> Tensor:
    """The same values as a tensor of `device` whose bytes lie in pinned host memory.

    Args:
        table: contiguous, on the host (a view of a mapped file, say) or on the device; it is copied once.
    Raises:
        ConfigError: the host does not give so much pinned memory.
    """
    # Not pin_memory(): its allocator rounds up to a power of two, which for a table of 94 GiB is 34 GiB too many. Pages of its own, since
    # what is pinned is whole pages, and no page can be pinned twice.
    host = torch.frombuffer(mmap.mmap(-1, table.numel() * table.element_size()), dtype=torch.uint8)
    status = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), _REGISTER_MAPPED)
    if int(status) != 0:
        raise ConfigError(f"the host does not pin {host.numel():,} bytes for a lookup table (CUDA error {int(status)})")
    host.copy_(table.contiguous().view(torch.uint8).view(-1))
    held = _Bytes(host)
    weakref.finalize(held, torch.cuda.cudart().cudaHostUnregister, host.data_ptr()).atexit = False  # the driver may be gone by then
    return torch.as_tensor(held, device=device).view(table.dtype).view(table.shape)
