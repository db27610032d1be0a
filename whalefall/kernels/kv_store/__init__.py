# SPDX-License-Identifier: Apache-2.0
"""Cache writes."""

from whalefall.kernels.kv_store.reference import store_rows

__all__ = ["store_rows"]
