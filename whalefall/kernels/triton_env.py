# SPDX-License-Identifier: Apache-2.0
"""Whether Triton twins are of use in this process, and what they share on a device and in Triton's interpreter.

A family imports its Triton files only where `has_triton()` holds, so that a CPU machine neither needs Triton nor waits for its import.
The interpreter (TRITON_INTERPRET=1, CPU tensors) runs the same kernels in tests.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch


def is_interpreted() -> bool:
    """Triton was asked to run kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def has_triton() -> bool:
    """Triton is installed and there is something to run it on."""
    return find_spec("triton") is not None and (torch.cuda.is_available() or is_interpreted())
