# SPDX-License-Identifier: Apache-2.0
"""Between logits and a token id: grammar masks, argmax, penalties, filters, counter-based draws, acceptance of drafts, ranks."""

from whalefall.kernels.sampling.random import Purpose, exponential_noise, random_bits
from whalefall.kernels.sampling.reference import NO_LIMIT, apply_bitmask, argmax, count_tokens, draw, keep_top, penalise, rank, top_ids
from whalefall.kernels.sampling.verify import MAX_BLOCK, accept_block, accept_standard, block_purpose
from whalefall.kernels.triton_env import has_triton

if has_triton():
    from whalefall.kernels.sampling import triton as _triton  # noqa: F401  registers its twins

__all__ = [
    "MAX_BLOCK",
    "NO_LIMIT",
    "Purpose",
    "accept_block",
    "accept_standard",
    "apply_bitmask",
    "argmax",
    "block_purpose",
    "count_tokens",
    "draw",
    "exponential_noise",
    "keep_top",
    "penalise",
    "random_bits",
    "rank",
    "top_ids",
]
