# SPDX-License-Identifier: Apache-2.0
"""Dense and packed matrix products. On a GPU: triton for packed weights, cublas for dense ones, else the reference."""

from whalefall.kernels.gemm import cublas as _cublas  # noqa: F401  registers its twins
from whalefall.kernels.gemm.reference import grouped_linear, grouped_linear_fp8_tile, linear, linear_float32, linear_fp8_tile
from whalefall.kernels.triton_env import has_triton

if has_triton():
    from whalefall.kernels.gemm import triton_float32 as _float32  # noqa: F401  each registers its twins
    from whalefall.kernels.gemm import triton_fp8 as _fp8  # noqa: F401

__all__ = ["grouped_linear", "grouped_linear_fp8_tile", "linear", "linear_float32", "linear_fp8_tile"]
