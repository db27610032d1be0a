# SPDX-License-Identifier: Apache-2.0
"""Dense and packed matrix products."""

from whalefall.kernels.gemm.reference import grouped_linear, linear, linear_float32, linear_fp8_tile

__all__ = ["grouped_linear", "linear", "linear_float32", "linear_fp8_tile"]
