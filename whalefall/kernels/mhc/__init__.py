# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections between residual streams."""

from whalefall.kernels.mhc.reference import collapse, expand, mixes

__all__ = ["collapse", "expand", "mixes"]
