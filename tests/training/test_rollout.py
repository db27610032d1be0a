# SPDX-License-Identifier: Apache-2.0
"""Krill's continuations are the model's own, with its features; rounding in a graph is the checkpoint's; the draft's loss falls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from training.checkpoint import load_official
from training.model import Krill
from training.optimiser import Optimiser, rounded
from training.prepare import EOS_ID
from training.rollout import END_THINK_ID, Bank, Prompts, chat_prompts, roll_out
from training.train_draft import Step, draw
from whalefall.engine.embedded import embedded_model_dir
from whalefall.kernels.quant import reference


@pytest.fixture(scope="module")
def model() -> Krill:
    return load_official(embedded_model_dir())


@pytest.fixture(scope="module")
def bank(model: Krill) -> Bank:
    bank = Bank.empty(2, 48, model)
    prompts = Prompts(torch.randint(40, 4000, (3, 12), generator=torch.Generator().manual_seed(2)).short(), torch.tensor([9, 12, 5]))
    roll_out(model, prompts, bank, 16, torch.Generator().manual_seed(0))
    return bank


def test_states_of_continuations_equal_a_whole_forward(model: Krill, bank: Bank) -> None:
    p = model.make_pass(round_cache=True)
    with torch.no_grad():
        hidden = model(bank.ids.long(), p)
    far = (hidden - bank.hidden).abs().amax(-1)
    assert far.median() < 1e-4  # single rows may differ by a rounding that flips
    assert (torch.cat(p.taps, -1) - bank.features).abs().median() < 1e-4


def test_greedy_continuations_are_the_likeliest_tokens(model: Krill, bank: Bank) -> None:
    best = model.logits(bank.hidden).argmax(-1)
    written = bank.written[:, 1:]
    assert written.any() and not written.all()
    assert (best[:, :-1][written] == bank.ids[:, 1:][written]).all()


def test_chat_prompts_end_where_the_model_answers() -> None:
    tokens = np.array([0, 6, 50, 7, END_THINK_ID, 60, 61, EOS_ID, 6, 51, 52, 7, END_THINK_ID, 62, EOS_ID], np.uint16)
    prompts = chat_prompts(tokens, 6, "cpu")
    assert prompts.lengths.tolist() == [5, 5]
    assert prompts.ids[:, :5].tolist() == [[0, 6, 50, 7, END_THINK_ID], [6, 51, 52, 7, END_THINK_ID]]


def test_rounding_without_tables_is_mxfp4() -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * 3
    x[0], x[1] = 0.0, torch.arange(64) * 0.125
    assert torch.equal(rounded(x, "fp4"), reference.dequantize_mxfp4(*reference.quantize_mxfp4(x), torch.float32))


def test_a_few_steps_lower_the_loss_and_touch_no_backbone_weight(model: Krill, bank: Bank) -> None:
    before = model.layers[0].attn.wq_a.weight.clone()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("mtp.") and not name.endswith("gate.bias"))
    optimiser = Optimiser(((n, p) for n, p in model.named_parameters() if n.startswith("mtp.")), quantise=True)
    batch, _ = draw(bank, 2, 8, torch.Generator().manual_seed(0))
    step = Step(model, optimiser, batch)
    accepted = []
    for _ in range(4):
        step.run(batch, 0.3, 0.3)
        accepted.append(step.shown[..., 0].mean().item())
    assert accepted[-1] > accepted[0]
    assert torch.equal(before, model.layers[0].attn.wq_a.weight)
