# SPDX-License-Identifier: Apache-2.0
"""Triton twins mean what the references mean, shown without a GPU: each runs in Triton's interpreter on its family's cases.

What the interpreter cannot show: the inline assembly that unpacks weights (it has a branch of its own), the rounding of hardware casts, and
anything about speed. On a GPU `test_twins.py` runs the same twins as compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FAMILIES = {
    "gemm": ("gemm.linear_fp8_tile", "gemm.grouped_linear_fp8_tile", "gemm.linear_float32"),
    "moe": ("moe.gate", "moe.clamped_swiglu", "moe.experts_mxfp4", "moe.experts_mxfp4_onto", "moe.swiglu_fp8_tile"),
    "latent": ("latent.norm_rotate_round", "latent.rotate_round"),
    "rows": ("norm.rms_norm", "rope.rotate", "kv_store.store_rows", "sampling.argmax", "sampling.draw"),
    "attention": ("attention.sparse_mqa",),
    "indexer": ("indexer.select", "indexer.select_with_candidates", "indexer.select_within"),
    "mhc": ("mhc.mixes", "mhc.collapse", "mhc.expand"),
    "quant": ("quant.dequantize_fp8_tile", "quant.fakequant_mxfp4", "quant.fakequant_mxfp8", "quant.fakequant_nvfp4"),
}


SLOW = ("indexer", "moe")


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (extra: gpu)")
@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow) if f in SLOW else f for f in FAMILIES])
def test_interpreted_twins_equal_the_reference(family: str) -> None:
    names = FAMILIES[family]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.interpreted", *names]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(names), f"a twin is missing: {done.stdout}"
