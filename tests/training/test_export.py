# SPDX-License-Identifier: Apache-2.0
"""What is shipped is what was trained: storing and reading back changes no value that was already rounded, for every format."""

from __future__ import annotations

import torch

from training.checkpoint import load_official, unstacked
from training.export import stored
from training.optimiser import orthogonalise, rounded
from training.sinkhorn import sinkhorn
from whalefall.engine.embedded import embedded_model_dir
from whalefall.kernels.quant import reference

READ_BACK = {"fp8": reference.dequantize_fp8_tile, "fp4": reference.dequantize_mxfp4, "row": reference.dequantize_fp8_row}


def test_storing_the_shipped_model_again_changes_nothing() -> None:
    formats = set()
    for name, fmt, value in unstacked(load_official(embedded_model_dir())):
        formats.add(fmt)
        tensors = stored(name, fmt, value)
        if fmt in READ_BACK:
            again = READ_BACK[fmt](tensors[name], tensors[name.removesuffix("weight") + "scale"].view(torch.uint8), torch.float32)
        else:
            again = tensors[name].float()
        assert torch.equal(again, value), name
    assert formats == {"fp8", "fp4", "row", "bf16", "fp32"}


def test_training_rounds_as_the_export_does() -> None:
    torch.manual_seed(0)
    value = torch.randn(3, 64, 96)
    for fmt, read in READ_BACK.items():
        tensors = stored("x.weight", fmt, value.flatten(0, 1))
        again = read(tensors["x.weight"], tensors["x.scale"].view(torch.uint8), torch.float32)
        assert torch.equal(rounded(value, fmt), again.view_as(value))
        assert not torch.equal(again.view_as(value), value)


def test_sinkhorn_gives_rows_and_columns_of_sum_one() -> None:
    torch.manual_seed(0)
    comb = sinkhorn(torch.softmax(torch.randn(7, 4, 4), -1) + 1e-6, 20, 1e-6)
    torch.testing.assert_close(comb.sum(-2), torch.ones(7, 4), atol=1e-4, rtol=0)
    torch.testing.assert_close(comb.sum(-1), torch.ones(7, 4), atol=1e-2, rtol=0)


def test_muon_steps_are_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    for shape in ((2, 64, 32), (2, 32, 64)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.4 and values.max() < 1.4
