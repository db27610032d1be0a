# SPDX-License-Identifier: Apache-2.0
"""Selection of compressed entries."""

from whalefall.kernels.indexer.reference import select, select_with_candidates, select_within

__all__ = ["select", "select_with_candidates", "select_within"]
