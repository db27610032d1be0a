# SPDX-License-Identifier: Apache-2.0
"""Gate and experts. Order of preference: triton on a GPU; of experts_dense, cpu_grouped for few rows on a CPU; else the reference."""

from whalefall.kernels.moe import cpu as _cpu  # noqa: F401  registers its twin
from whalefall.kernels.moe.reference import clamped_swiglu, experts_dense, experts_mxfp4, experts_mxfp4_onto, gate, swiglu_fp8_tile
from whalefall.kernels.triton_env import has_triton

if has_triton():
    from whalefall.kernels.moe import triton_experts as _experts  # noqa: F401  each registers its twins
    from whalefall.kernels.moe import triton_gate as _gate  # noqa: F401
    from whalefall.kernels.moe import triton_shared as _shared  # noqa: F401

__all__ = ["clamped_swiglu", "experts_dense", "experts_mxfp4", "experts_mxfp4_onto", "gate", "swiglu_fp8_tile"]
