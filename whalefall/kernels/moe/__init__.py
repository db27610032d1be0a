# SPDX-License-Identifier: Apache-2.0
"""Gate and experts. Order of preference of experts_dense: cpu_grouped for few rows on a CPU, else the reference."""

from whalefall.kernels.moe import cpu as _cpu  # noqa: F401  registers its twin
from whalefall.kernels.moe.reference import clamped_swiglu, experts_dense, experts_mxfp4, gate

__all__ = ["clamped_swiglu", "experts_dense", "experts_mxfp4", "gate"]
