# SPDX-License-Identifier: Apache-2.0
"""Norms."""

from whalefall.kernels.norm.reference import rms_norm

__all__ = ["rms_norm"]
