# SPDX-License-Identifier: Apache-2.0
"""The training model is the architecture: logits, bounded replay and drafts equal the golden vectors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from training.checkpoint import load_official
from training.draft import confidence, draft, markov
from training.model import Krill

GOLDENS = Path(os.environ.get("WHALEFALL_GOLDENS", Path(__file__).parents[3] / "shared" / "goldens"))
pytestmark = pytest.mark.skipif(not GOLDENS.exists(), reason="no golden vectors here")


@pytest.fixture(scope="module", params=["v41-a-fp32", "v41-a-quant"])
def golden(request: pytest.FixtureRequest) -> tuple[Krill, dict[str, torch.Tensor]]:
    folder = GOLDENS / request.param
    return load_official(folder), load_file(folder / "expected.safetensors")


@pytest.mark.parametrize("n", [1, 2, 3, 7, 33, 130, 300])
@torch.no_grad()
def test_logits(golden: tuple[Krill, dict[str, torch.Tensor]], n: int) -> None:
    model, expected = golden
    ids = expected[f"prompt.{n}.input_ids"].unsqueeze(0)
    logits = model.logits(model(ids, model.make_pass()))[0]
    assert (logits - expected[f"prompt.{n}.logits"]).abs().max() < 1e-3
    if f"prompt.{n}.bounded_replay_last_logits" in expected:
        p = model.make_pass(bounded_from=n - model.c.sliding_window)
        assert (model.logits(model(ids, p))[0, -1] - expected[f"prompt.{n}.bounded_replay_last_logits"]).abs().max() < 1e-3


@pytest.mark.parametrize("n", [33, 70])
@torch.no_grad()
def test_drafts(golden: tuple[Krill, dict[str, torch.Tensor]], n: int) -> None:
    model, expected = golden
    ids = expected[f"prompt.{n}.input_ids"].unsqueeze(0)
    p = model.make_pass()
    model(ids, p)
    drafts = draft(model, ids, torch.cat(p.taps, -1), torch.tensor([n - 2]), p)
    assert (drafts.base[0, 0] - expected[f"dspark.{n}.base_logits"]).abs().max() < 1e-3
    token = ids[0, -1]
    for i in range(model.c.dspark_block_size):
        e, extra = markov(model, token)
        logits = drafts.base[0, 0, i] + extra
        assert (logits - expected[f"dspark.{n}.logits"][i]).abs().max() < 1e-3
        assert (confidence(model, drafts.hidden[0, 0, i], e) - expected[f"dspark.{n}.confidence_raw"][i]).abs() < 1e-3
        token = logits.argmax(-1)
        assert token == expected[f"dspark.{n}.tokens"][i]
