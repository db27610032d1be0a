# SPDX-License-Identifier: Apache-2.0
"""Sparse attention. Order of preference: cpu_tiles on a CPU, else the reference."""

from whalefall.kernels.attention import cpu as _cpu  # noqa: F401  registers its twin
from whalefall.kernels.attention.reference import sparse_mqa

__all__ = ["sparse_mqa"]
