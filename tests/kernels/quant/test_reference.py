# SPDX-License-Identifier: Apache-2.0
"""Number formats at their edges: ties, scales, saturation, NaN, round trips."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from whalefall.kernels.cases import normal
from whalefall.kernels.quant import reference as quant

TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
"""Midpoints of E2M1; each goes to its neighbour with the even code."""


@pytest.mark.parametrize(("midpoint", "rounded"), TIES.items())
def test_an_e2m1_tie_goes_to_the_even_code(midpoint: float, rounded: float) -> None:
    x = torch.tensor([midpoint, -midpoint])
    assert quant.round_e2m1(x).tolist() == [rounded, -rounded]
    assert quant.e2m1_values(quant.e2m1_codes(x)).tolist() == [rounded, -rounded]
    assert quant.e2m1_codes(x).tolist() == [quant.E2M1_VALUES.index(rounded), 8 + quant.E2M1_VALUES.index(rounded)]
    assert quant.e2m1_codes(x)[0] % 2 == 0


@pytest.mark.parametrize("midpoint", TIES)
def test_beside_a_tie_the_nearer_value_wins(midpoint: float) -> None:
    below, above = (torch.tensor(midpoint).nextafter(torch.tensor(way)) for way in (0.0, 9.0))
    lower = max(v for v in quant.E2M1_VALUES if v < midpoint)
    upper = min(v for v in quant.E2M1_VALUES if v > midpoint)
    assert quant.round_e2m1(torch.stack((below, above, -below, -above))).tolist() == [lower, upper, -lower, -upper]


def test_e2m1_keeps_the_sign_of_zero_and_saturates() -> None:
    x = torch.tensor([-0.25, -0.0, 0.0, 5.0001, 7.0, 1e9, -1e9, math.inf, -math.inf])
    assert quant.round_e2m1(x).tolist() == [0, 0, 0, 6, 6, 6, -6, 6, -6]
    assert quant.round_e2m1(x).signbit().tolist() == [True, True, False, False, False, False, True, False, True]


def test_nan_is_refused_where_it_cannot_be_stored_and_kept_where_it_can() -> None:
    x = torch.tensor([[1.0, math.nan] * 16])
    with pytest.raises(ValueError, match="NaN"):
        quant.e2m1_codes(x)
    with pytest.raises(ValueError, match="NaN"):
        quant.quantize_mxfp4(x)
    assert quant.round_e2m1(x).isnan().tolist() == x.isnan().tolist()
    assert quant.round_e4m3(x).isnan().tolist() == x.isnan().tolist()
    for fakequant in (quant.fakequant_mxfp8, quant.fakequant_mxfp4, quant.fakequant_nvfp4):
        assert fakequant(x).isnan().any(), "a fault upstream must stay visible"


def test_all_e2m1_codes_round_trip() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(quant.e2m1_codes(quant.e2m1_values(codes)), codes)


@pytest.mark.parametrize("value", [448.0, 449.0, 464.0, 465.0, 500.0, 1e4, 3e38, math.inf])
def test_a_cast_to_e4m3_saturates(value: float) -> None:
    assert quant.round_e4m3(torch.tensor([value, -value])).tolist() == [448.0, -448.0]


def test_every_e4m3_value_and_tie_rounds_right() -> None:
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(quant.round_e4m3(values), values)
    middle = (values[1:] + values[:-1]) / 2  # exact in float32
    even = torch.where(torch.arange(126) % 2 == 0, values[:-1], values[1:])
    assert torch.equal(quant.round_e4m3(middle), even)


def test_ue8m0_is_exact_at_both_ends() -> None:
    found = quant.ue8m0_values(torch.tensor([0, 1, 126, 127, 128, 254], dtype=torch.uint8))
    assert found.tolist() == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]
    stored = torch.tensor([0, 127, 254], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert quant.ue8m0_values(stored).tolist() == [2.0**-127, 1.0, 2.0**127]


@pytest.mark.parametrize(
    ("quantise", "largest"), [(quant.quantize_fp8_tile, 448.0), (quant.quantize_fp8_row, 448.0), (quant.quantize_mxfp4, 6.0)]
)
@pytest.mark.parametrize("exponent", [-30, -1, 0, 7])
def test_the_scale_changes_just_above_the_largest_value(quantise, largest: float, exponent: int) -> None:  # type: ignore[no-untyped-def]
    def byte(amax: float) -> int:
        return int(quantise(torch.full((32, 32), amax))[1].flatten()[0])

    at = largest * 2.0**exponent
    assert byte(at) == 127 + exponent
    assert byte(torch.tensor(at).nextafter(torch.tensor(0.0)).item()) == 127 + exponent
    assert byte(torch.tensor(at).nextafter(torch.tensor(1e30)).item()) == 128 + exponent


@pytest.mark.parametrize("quantise", [quant.quantize_fp8_tile, quant.quantize_fp8_row, quant.quantize_mxfp4])
def test_an_all_zero_block_has_scale_one(quantise) -> None:  # type: ignore[no-untyped-def]
    stored, byte = quantise(torch.zeros(32, 64))
    assert byte.unique().tolist() == [127]
    assert stored.view(torch.uint8).unique().tolist() == [0]


@pytest.mark.parametrize(
    ("quantise", "dequantise", "step"),
    [
        (quant.quantize_fp8_tile, quant.dequantize_fp8_tile, 2.0**-4),
        (quant.quantize_fp8_row, quant.dequantize_fp8_row, 2.0**-4),
        (quant.quantize_mxfp4, quant.dequantize_mxfp4, 2.0**-2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_values_round_trip(quantise, dequantise, step: float, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    w = normal(48, 96) * torch.logspace(-6, 6, 48)[:, None]
    once = dequantise(*quantise(w), dtype)
    again = dequantise(*quantise(once), dtype)
    assert once.dtype == dtype
    assert torch.equal(once, again)
    if quantise is not quant.quantize_fp8_tile:  # rows of a tile share a scale although these differ by powers of ten
        block_max = w.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
        assert ((once.float() - w).abs() <= step * block_max).all()


def test_the_low_nibble_is_the_even_column() -> None:
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 1] = 6.0, -0.5
    stored, byte = quant.quantize_mxfp4(w)
    assert stored.view(torch.uint8)[0, 0] == 7 | (9 << 4)
    assert quant.dequantize_mxfp4(stored, byte, torch.float32)[0, :2].tolist() == [6.0, -0.5]


def test_tiles_use_the_scale_of_their_rows_and_columns() -> None:
    ones = torch.ones(40, 70).to(torch.float8_e4m3fn)
    scale_nk = torch.tensor([[127, 128, 129], [130, 131, 132]], dtype=torch.uint8)
    found = quant.dequantize_fp8_tile(ones, scale_nk, torch.float32)
    assert found[[0, 31, 32, 39], 0].tolist() == [1, 1, 8, 8]
    assert found[0, [0, 31, 32, 63, 64, 69]].tolist() == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("fakequant", [quant.fakequant_mxfp8, quant.fakequant_mxfp4, quant.fakequant_nvfp4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_for_the_caches_is_idempotent(fakequant, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    once: Tensor = fakequant(normal(64, 96, dtype=dtype))
    assert once.dtype == dtype
    if fakequant is quant.fakequant_nvfp4:  # its scale follows the largest entry, which rounding may have moved
        once = fakequant(fakequant(once))
    assert torch.equal(fakequant(once), once)


def test_cache_formats_are_exact_in_bfloat16() -> None:
    for fakequant in (quant.fakequant_mxfp8, quant.fakequant_mxfp4, quant.fakequant_nvfp4):
        x = normal(16, 64, dtype=torch.bfloat16)
        assert torch.equal(fakequant(x).float(), fakequant(x.float()))


def test_the_floor_of_each_cache_scale() -> None:
    tiny = torch.full((1, 32), 1e-6)
    assert quant.fakequant_mxfp8(tiny)[0, 0] == pytest.approx(1e-6, rel=0.07)  # scale of 1e-4: still a subnormal of it
    assert quant.fakequant_mxfp8(torch.full((1, 32), 1e-10)).count_nonzero() == 0
    assert quant.fakequant_mxfp4(torch.full((1, 32), 1e-30))[0, 0] == pytest.approx(1e-30, rel=0.3)
    assert quant.fakequant_nvfp4(torch.full((1, 16), 2.0**-9))[0, 0] == 2.0**-9  # the smallest scale
    assert quant.fakequant_nvfp4(torch.full((1, 16), 2.0**-11)).count_nonzero() == 0
    assert quant.fakequant_nvfp4(torch.full((1, 16), 1e6))[0, 0] == 6 * 448


def test_an_fp4_group_of_sixteen_has_its_own_scale() -> None:
    x = torch.cat((torch.full((16,), 6.0), torch.full((16,), 0.1)))[None]
    assert quant.fakequant_nvfp4(x)[0, -1] == pytest.approx(0.1, rel=0.07)
    assert quant.fakequant_mxfp4(x)[0, -1] == 0  # 32 share one scale there
