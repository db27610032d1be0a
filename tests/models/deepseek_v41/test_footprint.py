# SPDX-License-Identifier: Apache-2.0
"""The footprint against really loaded models, and against the note's inventory of the release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.models.deepseek_v41.released_config import RELEASED
from whalefall.core.seams import LocalComm
from whalefall.models.deepseek_v41 import DEFINITION, DeepseekV41Config
from whalefall.models.definition import BuildContext
from whalefall.weights.loader import load_checkpoint

GOLDENS = Path(__file__).parents[4] / "shared" / "goldens"


def context(model_dir: Path, dtype: torch.dtype, weights: Literal["packed", "dense"]) -> BuildContext:
    return BuildContext(
        dtype=dtype, device=torch.device("cpu"), weights=weights, kv_cache_dtype="unrounded", comm=LocalComm(), model_dir=model_dir
    )


@pytest.mark.skipif(not GOLDENS.is_dir(), reason="no stored checkpoints beside the repository")
@pytest.mark.parametrize("weights", ["packed", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["v41-a-quant", "v41-a-fp32"])
def test_footprint_equals_a_loaded_model_to_the_byte(name: str, dtype: torch.dtype, weights: Literal["packed", "dense"]) -> None:
    folder = GOLDENS / name
    config = DeepseekV41Config.from_hf(json.loads((folder / "config.json").read_text()))
    made = context(folder, dtype, weights)
    built = DEFINITION.build(config, made)
    load_checkpoint(folder, DEFINITION.weight_map(config), built.sink, progress=None)
    tensors = {t.data_ptr(): t for t in (*built.model.parameters(), *built.model.buffers())}
    loaded = sum(t.numel() * t.element_size() for t in tensors.values())
    assert DEFINITION.footprint is not None
    assert sum(kind.num_bytes for kind in DEFINITION.footprint(config, made) if kind.place == "device") == loaded


def test_release_takes_what_the_inventory_says() -> None:
    config = DeepseekV41Config.from_hf(RELEASED)
    assert DEFINITION.footprint is not None
    kinds = {kind.name: kind for kind in DEFINITION.footprint(config, context(Path(), torch.bfloat16, "packed"))}
    assert kinds["routed experts"].num_bytes == 288_777_830_400
    assert kinds["Engram tables"].num_bytes == 202_758_032_400
    assert kinds["Engram tables"].place == "mapped"
    # Everything else of the inventory, but that norms, gates and compressor inputs are kept in float32.
    stored = 2_647_664_640 + 10_240 + 6_802_205_120 + 81_835_008 + 315_043_840
    rest = sum(kind.num_bytes for name, kind in kinds.items() if name not in ("routed experts", "Engram tables"))
    assert stored < rest < 1.03 * stored
