# SPDX-License-Identifier: Apache-2.0
"""Rotary positions."""

from whalefall.kernels.rope.reference import angles, plain_frequencies, rotate, yarn_frequencies

__all__ = ["angles", "plain_frequencies", "rotate", "yarn_frequencies"]
