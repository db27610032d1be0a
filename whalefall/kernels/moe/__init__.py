# SPDX-License-Identifier: Apache-2.0
"""Gate and experts."""

from whalefall.kernels.moe.reference import clamped_swiglu, experts_dense, experts_mxfp4, gate

__all__ = ["clamped_swiglu", "experts_dense", "experts_mxfp4", "gate"]
