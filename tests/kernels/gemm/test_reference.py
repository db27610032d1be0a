# SPDX-License-Identifier: Apache-2.0
"""Products that must not be rounded, and tiles that must not show."""

from __future__ import annotations

import pytest
import torch

from whalefall.kernels import gemm
from whalefall.kernels.cases import normal
from whalefall.kernels.gemm import reference


@pytest.mark.parametrize("elements", [1, 100, 64 * 7, 1 << 24])
def test_row_tiles_of_a_narrow_weight_do_not_change_the_product(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x_TK, w_NK = normal(5, 64, dtype=torch.bfloat16), normal(33, 64, seed=1, dtype=torch.bfloat16)
    monkeypatch.setattr(reference, "_FLOAT32_TILE_ELEMENTS", elements)
    found = gemm.linear_float32(x_TK, w_NK)
    assert found.shape == (5, 33)
    assert torch.allclose(found, x_TK.float() @ w_NK.float().T, atol=1e-5)


def test_a_float32_result_keeps_what_bfloat16_would_lose() -> None:
    x_TK, w_NK = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.bfloat16)
    assert gemm.linear_float32(x_TK, w_NK).item() == 257.0
    assert gemm.linear(x_TK, w_NK).item() == 256.0


def test_each_group_has_its_own_matrix() -> None:
    x_TGK, w_GNK = normal(3, 4, 8), torch.zeros(4, 2, 8)
    w_GNK[2] = normal(2, 8, seed=1)
    found = gemm.grouped_linear(x_TGK, w_GNK)
    assert found[:, [0, 1, 3]].count_nonzero() == 0
    assert torch.allclose(found[:, 2], x_TGK[:, 2] @ w_GNK[2].T, atol=1e-6)
