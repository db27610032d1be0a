# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections between residual streams. On a GPU: triton, else the reference."""

from whalefall.kernels.mhc.reference import collapse, expand, mixes
from whalefall.kernels.triton_env import has_triton

if has_triton():
    from whalefall.kernels.mhc import triton as _triton  # noqa: F401  registers its twins

__all__ = ["collapse", "expand", "mixes"]
