# SPDX-License-Identifier: Apache-2.0
"""Compressed entries."""

from whalefall.kernels.compress.reference import pool_group

__all__ = ["pool_group"]
