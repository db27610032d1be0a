# SPDX-License-Identifier: Apache-2.0
"""Selection of compressed entries. On a GPU: triton, else the reference."""

from whalefall.kernels.indexer.reference import select, select_with_candidates, select_within
from whalefall.kernels.triton_env import has_triton

if has_triton():
    from whalefall.kernels.indexer import triton as _triton  # noqa: F401  registers its twins

__all__ = ["select", "select_with_candidates", "select_within"]
