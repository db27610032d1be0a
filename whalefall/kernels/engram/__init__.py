# SPDX-License-Identifier: Apache-2.0
"""Hashed n-gram memory."""

from whalefall.kernels.engram.reference import gather_dense, gather_fp8, hash_rows, inject

__all__ = ["gather_dense", "gather_fp8", "hash_rows", "inject"]
