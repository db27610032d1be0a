# SPDX-License-Identifier: Apache-2.0
"""Packed weights to 16-bit floats in registers, four bytes at a time, for the Triton products.

E4M3 to bfloat16, with the scale: a code's bits go straight to their places and one multiplication by a power of two repairs the exponent
and applies the scale. To keep that factor within bfloat16 whatever the scale, values come out 2**63 times too small; products multiply
their sums by `RESTORE`. Scales within [2**-60, 2**60] are exact. 2 instructions a value.

E2M1 to float16: codes become E4M3 bytes, four at a time, which Hopper widens by itself; values come out 2**6 times too small
(`HALF_RESTORE`). 1.4 instructions a value with the scale left to the sums, 1.9 with it, as a power of two relative to the row's largest.
E4M3 to float16 in the same way: 1 instruction a value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from whalefall.kernels.triton_math import INTERPRETED

RESTORE = tl.constexpr(2.0**63)

# Byte i of four to both bytes of a half word; then sign to bit 15, exponent and mantissa to bits 10..4.
_E4M3 = tl.constexpr("""
{
.reg .b32 a, b, s, m;
prmt.b32 a, $2, 0, 0x1100;
prmt.b32 b, $2, 0, 0x3322;
and.b32 s, a, 0x80008000;
shl.b32 m, a, 4;
lop3.b32 m, m, 0x07F007F0, s, 0xEA;
mul.bf16x2 $0, m, $3;
and.b32 s, b, 0x80008000;
shl.b32 m, b, 4;
lop3.b32 m, m, 0x07F007F0, s, 0xEA;
mul.bf16x2 $1, m, $4;
}
""")
_E2M1_HALF = tl.constexpr("""
{
.reg .b32 s, m;
.reg .b16 p, q;
shl.b32 s, $4, 4;
and.b32 s, s, 0x80808080;
shl.b32 m, $4, 2;
lop3.b32 m, m, 0x1C1C1C1C, s, 0xEA;
mov.b32 {p, q}, m;
cvt.rn.f16x2.e4m3x2 $0, p;
cvt.rn.f16x2.e4m3x2 $1, q;
and.b32 s, $4, 0x80808080;
shr.b32 m, $4, 2;
lop3.b32 m, m, 0x1C1C1C1C, s, 0xEA;
mov.b32 {p, q}, m;
cvt.rn.f16x2.e4m3x2 $2, p;
cvt.rn.f16x2.e4m3x2 $3, q;
}
""")
_E2M1_SCALED = tl.constexpr("""
{
.reg .b32 s, m;
.reg .b16 p, q;
shl.b32 s, $4, 4;
and.b32 s, s, 0x80808080;
shl.b32 m, $4, 2;
lop3.b32 m, m, 0x1C1C1C1C, s, 0xEA;
mov.b32 {p, q}, m;
cvt.rn.f16x2.e4m3x2 s, p;
mul.f16x2 $0, s, $5;
cvt.rn.f16x2.e4m3x2 s, q;
mul.f16x2 $1, s, $6;
and.b32 s, $4, 0x80808080;
shr.b32 m, $4, 2;
lop3.b32 m, m, 0x1C1C1C1C, s, 0xEA;
mov.b32 {p, q}, m;
cvt.rn.f16x2.e4m3x2 s, p;
mul.f16x2 $2, s, $5;
cvt.rn.f16x2.e4m3x2 s, q;
mul.f16x2 $3, s, $6;
}
""")
_E4M3_SCALED = tl.constexpr("""
{
.reg .b32 s;
.reg .b16 p, q;
mov.b32 {p, q}, $2;
cvt.rn.f16x2.e4m3x2 s, p;
mul.f16x2 $0, s, $3;
cvt.rn.f16x2.e4m3x2 s, q;
mul.f16x2 $1, s, $4;
}
""")
HALF_RESTORE = tl.constexpr(2.0**6)
SCALED_RESTORE = tl.constexpr(2.0**-9)
E4M3_SCALED_RESTORE = tl.constexpr(2.0**-7)


@triton.jit
def e4m3_factor(scale_bytes):
    """What `unpack_e4m3` multiplies by, from UE8M0 bytes: 2**(byte - 127 + 57)."""
    if INTERPRETED:
        return ((scale_bytes.to(tl.int32) + 57) << 23).to(tl.float32, bitcast=True)
    else:
        return ((scale_bytes.to(tl.int16) + 57) << 7).to(tl.bfloat16, bitcast=True)


@triton.jit
def places(byte):
    """Where the warp-group matrix units want the columns of 16 packed bytes: byte 4 t + 2 h + l at place 8 h + 2 t + l.

    Then four bytes that are neighbours in memory go to one thread. Activations are laid out so beforehand.
    """
    return byte // 16 * 16 + byte // 2 % 2 * 8 + byte // 4 % 4 * 2 + byte % 2


@triton.jit
def in_places(raw, N: tl.constexpr, SIXTEENS: tl.constexpr):
    """[N, 16 * SIXTEENS] packed bytes in their `places`."""
    return tl.reshape(tl.trans(tl.reshape(raw, (N, SIXTEENS, 4, 2, 2)), 0, 1, 3, 2, 4), (N, SIXTEENS * 16))


@triton.jit
def e4m3_scaled_factor(exponents):
    """What `unpack_e4m3_scaled` multiplies by: 2**(e + 7) of int32 exponents e <= 0; 0 below -21."""
    return _half_power(exponents + 22)


@triton.jit
def e2m1_factor(exponents):
    """What `unpack_e2m1_scaled` multiplies by: 2**(e + 15) of int32 exponents e <= 0; 0 below -29."""
    return _half_power(exponents + 30)


@triton.jit
def _half_power(biased):
    """float16 2**(biased - 15) of int32 biased <= 30; 0 where it is not positive."""
    bits = tl.maximum(biased, 0)
    if INTERPRETED:
        return tl.where(bits > 0, ((bits + 112) << 23).to(tl.float32, bitcast=True), 0.0)
    else:
        return (bits << 10).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _e2m1_bits(code):
    code = code.to(tl.int32)
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)


@triton.jit
def unpack_e4m3(raw, factor):
    """Values of uint8 E4M3 bytes times their factors (same shape): values * scale * 2**-63."""
    if INTERPRETED:
        bits = raw.to(tl.int32)
        return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * factor
    else:
        return tl.inline_asm_elementwise(_E4M3, "=&r,=&r,r,r,r", [raw, factor], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def unpack_e2m1_half(raw):
    """(low nibbles, high nibbles) of uint8 bytes as float16: values * 2**-6."""
    if INTERPRETED:
        return _e2m1_bits(raw & 15) * 2.0**120, _e2m1_bits(raw >> 4) * 2.0**120
    else:
        return tl.inline_asm_elementwise(_E2M1_HALF, "=&r,=&r,=&r,=&r,r", [raw], dtype=(tl.float16, tl.float16), is_pure=True, pack=4)


@triton.jit
def unpack_e2m1_scaled(raw, factor):
    """As `unpack_e2m1_half`, times factors of the same shape from `e2m1_factor`: values * 2**(e + 9)."""
    if INTERPRETED:
        return _e2m1_bits(raw & 15) * 2.0**120 * factor, _e2m1_bits(raw >> 4) * 2.0**120 * factor
    else:
        return tl.inline_asm_elementwise(
            _E2M1_SCALED, "=&r,=&r,=&r,=&r,r,r,r", [raw, factor], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )


@triton.jit
def unpack_e4m3_scaled(raw, factor):
    """uint8 E4M3 bytes as float16 times factors of the same shape from `e4m3_scaled_factor`: values * 2**(e + 7)."""
    if INTERPRETED:
        bits = raw.to(tl.int32)
        return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120 * factor
    else:
        return tl.inline_asm_elementwise(_E4M3_SCALED, "=&r,=&r,r,r,r", [raw, factor], dtype=tl.float16, is_pure=True, pack=4)
