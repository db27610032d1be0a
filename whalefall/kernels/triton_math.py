# SPDX-License-Identifier: Apache-2.0
"""Device functions that Triton twins share: products and roundings that mean the same on a device and in the interpreter.

The interpreter multiplies bfloat16 matrices wrongly and truncates float32 to bfloat16; both are put right here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from whalefall.kernels.triton_env import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, accumulated in float32."""
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, acc)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 x in dtype, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        x = tl.where(x != x, x, rounded)
    return x.to(dtype)


@triton.jit
def power_of_two(exponent):
    """Exact float32 2**exponent of int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def round_half_even(x):
    """float32 x in [0, 2**22) rounded to the nearest integer, ties to even."""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def round_e4m3(x):
    """float32 x rounded to the nearest E4M3 value, saturating at 448; NaN stays NaN."""
    size = tl.minimum(tl.abs(x), 448.0)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    rounded = round_half_even(size * power_of_two(3 - exponent)) * power_of_two(exponent - 3)
    return tl.where(x != x, x, tl.where(x < 0, -rounded, rounded))


@triton.jit
def round_e2m1(x):
    """float32 x rounded to the nearest E2M1 value, ties to the even code, saturating at 6; NaN stays NaN."""
    size = tl.minimum(tl.abs(x), 6.0)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, 0)
    rounded = round_half_even(size * power_of_two(1 - exponent)) * power_of_two(exponent - 1)
    return tl.where(x != x, x, tl.where(x < 0, -rounded, rounded))


@triton.jit
def exponent_ceil(x):
    """int32 ceil(log2(x)) of normal positive float32 x, exact."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) - 127 + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
