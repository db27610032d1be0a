# SPDX-License-Identifier: Apache-2.0
"""What happens to a vector between its projection and its cache, in one pass. On a GPU: triton, else the reference."""

from whalefall.kernels.latent.reference import Rounding, norm_rotate_round, rotate_round
from whalefall.kernels.triton_env import has_triton

if has_triton():
    from whalefall.kernels.latent import triton as _triton  # noqa: F401  registers its twins

__all__ = ["Rounding", "norm_rotate_round", "rotate_round"]
