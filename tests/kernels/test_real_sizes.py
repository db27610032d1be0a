# SPDX-License-Identifier: Apache-2.0
"""On a GPU: twins at the model's own sizes err no more than twice what plain torch errs in the same dtype."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.gpu_k1 import GROUPS, errors

TOKENS = (1, 9, 33, 65, 300, 600)
"""One on each side of every change of form."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("group", [name for name in GROUPS if name != "sweep"])
def test_twins_hold_at_real_sizes(group: str) -> None:
    num_checked = 0
    for row in GROUPS[group](TOKENS):
        if not row.checks:
            continue
        twin, plain = errors(row)
        allowed = max(2 * plain, torch.finfo(torch.bfloat16).eps)
        assert twin <= allowed, f"{row.kernel} {row.shape}, {row.tokens} tokens: {twin:.3g}, allowed {allowed:.3g}"
        num_checked += 1
        row.sets.clear()
    assert num_checked
