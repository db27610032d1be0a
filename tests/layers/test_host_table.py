# SPDX-License-Identifier: Apache-2.0
"""Claim: a table in pinned host memory reads like one on the device, and takes no device memory."""

from __future__ import annotations

import pytest
import torch

from whalefall.kernels import engram
from whalefall.layers.host_table import pinned_view

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn])
def test_a_pinned_table_is_gathered_by_the_device(dtype: torch.dtype) -> None:
    table = torch.randint(0, 119, (1000, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    table = table.to(dtype) if dtype == torch.bfloat16 else table.view(dtype)
    before = torch.cuda.memory_allocated()
    view = pinned_view(table, torch.device("cuda"))
    assert view.is_cuda and view.dtype == dtype and view.shape == table.shape and torch.cuda.memory_allocated() == before
    rows_TJ = torch.randint(0, 1000, (7, 3), generator=torch.Generator().manual_seed(1))
    found = view.view(torch.uint8)[rows_TJ.cuda()].cpu()
    assert torch.equal(found, table.view(torch.uint8)[rows_TJ])


def test_fp8_rows_of_a_pinned_table_are_dequantised_on_the_device() -> None:
    table = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.randint(118, 130, (100, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    rows_TJ = torch.tensor([[3, 99], [0, 3]])
    device = torch.device("cuda")
    found = engram.gather_fp8(pinned_view(table, device), pinned_view(scale, device), rows_TJ.cuda(), torch.float32)
    assert torch.equal(found.cpu(), engram.gather_fp8.reference(table, scale, rows_TJ, torch.float32))
