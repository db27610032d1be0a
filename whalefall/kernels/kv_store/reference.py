# SPDX-License-Identifier: Apache-2.0
"""Writes into the pools."""

from __future__ import annotations

from torch import Tensor

from whalefall.kernels.kv_store import cases
from whalefall.kernels.registry import op


@op("kv_store.store_rows", cases=cases.writes)
def store_rows(pool_RD: Tensor, rows_T: Tensor, values_TD: Tensor) -> None:
    """pool[rows] = values, in place, rounded to the pool's dtype. Rows may repeat only where nothing reads them (the null block)."""
    pool_RD.index_copy_(0, rows_T, values_TD.to(pool_RD.dtype))
