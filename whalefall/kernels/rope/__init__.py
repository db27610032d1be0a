# SPDX-License-Identifier: Apache-2.0
"""Rotary positions. On a GPU: triton, else the reference."""

from whalefall.kernels.rope.reference import angles, plain_frequencies, rotate, yarn_frequencies
from whalefall.kernels.triton_env import has_triton

if has_triton():
    from whalefall.kernels.rope import triton as _triton  # noqa: F401  registers its twins

__all__ = ["angles", "plain_frequencies", "rotate", "yarn_frequencies"]
