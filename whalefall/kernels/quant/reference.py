# SPDX-License-Identifier: Apache-2.0
"""Block-scaled number formats of DeepSeek-V4.1: what the checkpoint stores and what the caches round to.

E4M3 values are torch.float8_e4m3fn; E2M1 values are 4-bit codes, two to a byte with the even column in the low nibble; UE8M0 scales are
uint8 exponents with bias 127. Every cast to E4M3 clamps to 448 first: torch versions disagree on what an out-of-range cast gives.
Source: design note deepseek-v41 §2.1, §3.4, §3.5, §8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.kernels.quant import cases
from whalefall.kernels.registry import op

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
UE8M0_BIAS = 127


def e2m1_codes(x: Tensor) -> Tensor:
    """Nearest E2M1 code of each element, uint8 with the sign in bit 3; ties go to the even code, magnitudes above 6 saturate.

    Raises:
        ValueError: x holds NaN, which E2M1 cannot represent.
    """
    if x.isnan().any():
        raise ValueError("E2M1 has no NaN: the tensor to quantise holds NaN")
    return _e2m1_codes(x)


def _e2m1_codes(x: Tensor) -> Tensor:
    mag = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    # A midpoint whose lower neighbour has the even code stays below it (>), else goes up (>=).
    for midpoint, upper_wins_tie in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (mag >= midpoint) if upper_wins_tie else (mag > midpoint)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_values(codes: Tensor) -> Tensor:
    """float32 value of each 4-bit code (uint8, upper bits ignored)."""
    table = torch.tensor((*E2M1_VALUES, *(-v for v in E2M1_VALUES)), dtype=torch.float32, device=codes.device)
    return table[(codes & 15).int()]


def round_e2m1(x: Tensor) -> Tensor:
    """x rounded to the nearest E2M1 value (float32); NaN stays NaN, so that a fault upstream is seen, not hidden."""
    return torch.where(x.isnan(), x, e2m1_values(_e2m1_codes(x)))


def round_e4m3(x: Tensor) -> Tensor:
    """x rounded to the nearest E4M3 value, saturating at 448 (float32); NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def ue8m0_values(exponents: Tensor) -> Tensor:
    """float32 2**(byte - 127) of uint8 (or float8_e8m0fnu) exponents."""
    bits = exponents if exponents.dtype == torch.uint8 else exponents.view(torch.uint8)
    return _power_of_two(bits.int() - UE8M0_BIAS)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Exact float32 2**exponent for int32 exponents in [-127, 127], built from the bits."""
    return torch.where(exponent > -UE8M0_BIAS, (exponent + UE8M0_BIAS) << 23, 1 << 22).view(torch.float32)


def _exponent_ceil(ratio: Tensor) -> Tensor:
    """int32 ceil(log2(ratio)) for positive ratio, exact (no logarithm is rounded)."""
    mantissa, exponent = torch.frexp(ratio)  # ratio = mantissa * 2**exponent, mantissa in [0.5, 1)
    return exponent - (mantissa == 0.5).int()


def _ue8m0_scale(amax: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """The stored byte and the float32 scale that bring amax within `largest`; an all-zero block gets byte 127 (scale 1)."""
    exponent = torch.where(amax > 0, _exponent_ceil(amax / largest), 0).clamp(-UE8M0_BIAS, UE8M0_BIAS)
    return (exponent + UE8M0_BIAS).to(torch.uint8), _power_of_two(exponent)


def quantize_fp8_tile(w_NK: Tensor, tile: int = 32) -> tuple[Tensor, Tensor]:
    """FP8 tile format: E4M3 [N, K] and UE8M0 bytes [ceil(N/tile), ceil(K/tile)], one scale per square tile."""
    n, k = w_NK.shape
    padded = torch.nn.functional.pad(w_NK.float(), (0, -k % tile, 0, -n % tile))
    tiles = padded.unflatten(0, (-1, tile)).unflatten(2, (-1, tile))
    byte, scale = _ue8m0_scale(tiles.abs().amax(dim=(1, 3)), E4M3_MAX)
    scaled = (tiles / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:n, :k]
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), byte


def quantize_fp8_row(w_RC: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """FP8 row format: E4M3 [R, C] and UE8M0 bytes [R, C/group]."""
    groups = w_RC.float().unflatten(-1, (-1, group))
    byte, scale = _ue8m0_scale(groups.abs().amax(-1), E4M3_MAX)
    return (groups / scale[..., None]).flatten(-2).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), byte


def quantize_mxfp4(w_NK: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """MXFP4 format: int8 [N, K/2] (even column in the low nibble) and UE8M0 bytes [N, K/group]."""
    groups = w_NK.float().unflatten(-1, (-1, group))
    byte, scale = _ue8m0_scale(groups.abs().amax(-1), E2M1_MAX)
    codes = e2m1_codes((groups / scale[..., None]).flatten(-2))
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).view(torch.int8), byte


@op("quant.dequantize_fp8_tile", cases=cases.tiles)
def dequantize_fp8_tile(w_NK: Tensor, scale_nk: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of an FP8 tile matrix.

    Args:
        w_NK: float8_e4m3fn.
        scale_nk: UE8M0 bytes [ceil(N/32), ceil(K/32)]; element (n, k) uses scale (n // 32, k // 32).
    Returns:
        [N, K] in dtype, rounded once (exact in bfloat16 and float32 unless it under- or overflows).
    """
    n, k = w_NK.shape
    scale = ue8m0_values(scale_nk).repeat_interleave(32, 0)[:n].repeat_interleave(32, 1)[:, :k]
    return (w_NK.float() * scale).to(dtype)


@op("quant.dequantize_fp8_row", cases=cases.fp8_rows)
def dequantize_fp8_row(w_RC: Tensor, scale_Rg: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of FP8 rows [R, C] with one UE8M0 scale per 32 columns."""
    groups = w_RC.float().unflatten(-1, (scale_Rg.shape[-1], -1))
    return (groups * ue8m0_values(scale_Rg)[..., None]).flatten(-2).to(dtype)


@op("quant.dequantize_mxfp4", cases=cases.fp4_rows)
def dequantize_mxfp4(w_Nk: Tensor, scale_Ng: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [N, K] of an MXFP4 matrix stored as bytes [N, K/2] with one UE8M0 scale per 32 columns."""
    raw = w_Nk.view(torch.uint8)
    values = torch.stack((e2m1_values(raw), e2m1_values(raw >> 4)), dim=-1).flatten(-2)
    return (values.unflatten(-1, (scale_Ng.shape[-1], -1)) * ue8m0_values(scale_Ng)[..., None]).flatten(-2).to(dtype)


@op("quant.fakequant_mxfp8", cases=cases.caches)
def fakequant_mxfp8(x_TD: Tensor) -> Tensor:
    """Round to MXFP8 and back: E4M3 per 32 channels, scale 2**ceil(log2(max(amax, 1e-4) / 448)). Same dtype as x (exact in bfloat16)."""
    groups = x_TD.float().unflatten(-1, (-1, 32))
    scale = _power_of_two(_exponent_ceil(groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / E4M3_MAX))
    return (round_e4m3(groups / scale) * scale).flatten(-2).to(x_TD.dtype)


@op("quant.fakequant_mxfp4", cases=cases.caches)
def fakequant_mxfp4(x_TD: Tensor) -> Tensor:
    """Round to MXFP4 and back: E2M1 per 32 channels, scale 2**ceil(log2(max(amax, 6 * 2**-126) / 6))."""
    groups = x_TD.float().unflatten(-1, (-1, 32))
    scale = _power_of_two(_exponent_ceil(groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-126) / E2M1_MAX))
    return (round_e2m1(groups / scale) * scale).flatten(-2).to(x_TD.dtype)


@op("quant.fakequant_nvfp4", cases=cases.caches)
def fakequant_nvfp4(x_TD: Tensor) -> Tensor:
    """Round to NVFP4 and back: E2M1 per 16 channels, scale E4M3(clamp(amax / 6, 2**-9, 448))."""
    groups = x_TD.float().unflatten(-1, (-1, 16))
    scale = round_e4m3((groups.abs().amax(-1, keepdim=True) / E2M1_MAX).clamp(2.0**-9, E4M3_MAX))
    return (round_e2m1(groups / scale) * scale).flatten(-2).to(x_TD.dtype)
