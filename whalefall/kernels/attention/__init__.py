# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over one latent. On a CPU: tiles of tokens that share keys; on a GPU: triton; else the reference."""

from whalefall.kernels.attention import cpu as _cpu  # noqa: F401  registers its twins
from whalefall.kernels.attention.reference import sparse_mqa
from whalefall.kernels.triton_env import has_triton

if has_triton():
    from whalefall.kernels.attention import triton as _triton  # noqa: F401  registers its twins

__all__ = ["sparse_mqa"]
