# SPDX-License-Identifier: Apache-2.0
"""Sparse attention."""

from whalefall.kernels.attention.reference import sparse_mqa

__all__ = ["sparse_mqa"]
