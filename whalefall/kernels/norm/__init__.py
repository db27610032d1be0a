# SPDX-License-Identifier: Apache-2.0
"""Norms. On a GPU: triton, else the reference."""

from whalefall.kernels.norm.reference import rms_norm
from whalefall.kernels.triton_env import has_triton

if has_triton():
    from whalefall.kernels.norm import triton as _triton  # noqa: F401  registers its twins

__all__ = ["rms_norm"]
