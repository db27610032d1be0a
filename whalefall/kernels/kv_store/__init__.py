# SPDX-License-Identifier: Apache-2.0
"""Cache writes. On a GPU: triton, else the reference."""

from whalefall.kernels.kv_store.reference import store_rows
from whalefall.kernels.triton_env import has_triton

if has_triton():
    from whalefall.kernels.kv_store import triton as _triton  # noqa: F401  registers its twins

__all__ = ["store_rows"]
