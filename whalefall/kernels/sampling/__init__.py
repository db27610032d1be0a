# SPDX-License-Identifier: Apache-2.0
"""Ops between logits and a token id: grammar masks, argmax, penalties, filters, counter-based draws, ranks and alternatives."""

from whalefall.kernels.sampling.random import Purpose, exponential_noise, random_bits
from whalefall.kernels.sampling.reference import NO_LIMIT, apply_bitmask, argmax, count_tokens, draw, keep_top, penalise, rank, top_ids

__all__ = [
    "NO_LIMIT",
    "Purpose",
    "apply_bitmask",
    "argmax",
    "count_tokens",
    "draw",
    "exponential_noise",
    "keep_top",
    "penalise",
    "random_bits",
    "rank",
    "top_ids",
]
