# SPDX-License-Identifier: Apache-2.0
"""The eps of a norm, which random-weight logits hardly see."""

from __future__ import annotations

import pytest
import torch

from whalefall.kernels.norm import rms_norm


@pytest.mark.parametrize(("size", "expected"), [(1.0, 1.0), (1e-6, 1.0), (1e-9, 1 / 1.01**0.5 * 1.0), (1e-10, 0.5**0.5), (1e-12, 0.01)])
def test_an_eps_of_1e_20_shows_only_below_1e_9(size: float, expected: float) -> None:
    y = rms_norm(torch.full((1, 64), size), torch.ones(64), 1e-20)
    assert y[0, 0].item() == pytest.approx(expected, rel=1e-3)


def test_a_row_of_zeros_stays_zero() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert rms_norm(torch.zeros(2, 64, dtype=dtype), torch.ones(64), 1e-20).count_nonzero() == 0


def test_a_wide_row_of_large_numbers_does_not_overflow() -> None:
    assert rms_norm(torch.full((1, 5120), 1e4, dtype=torch.bfloat16), torch.ones(5120), 1e-20)[0, 0] == 1
