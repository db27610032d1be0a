# SPDX-License-Identifier: Apache-2.0
"""Ops between logits and a token id: argmax, penalties, filters, counter-based draws, ranks and alternatives."""

from whalefall.kernels.sampling.random import Purpose, exponential_noise, random_bits
from whalefall.kernels.sampling.reference import NO_LIMIT, argmax, count_tokens, draw, keep_top, penalise, rank, top_ids

__all__ = [
    "NO_LIMIT",
    "Purpose",
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
