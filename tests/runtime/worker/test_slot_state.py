# SPDX-License-Identifier: Apache-2.0
"""Rings, states, history and the two row sets arrive in a model exactly, whatever the scheduler does."""

from __future__ import annotations

import pytest

from tests.runtime.worker.driver import Engine
from tests.runtime.worker.probe import HISTORY, SPEC, VOCAB, WINDOW, Probe, expected_next

PROMPTS = {"a": [5, 9, 2], "b": list(range(3, 30)), "c": [7] * 11, "d": [96, 1], "e": list(range(40, 17, -1))}
NUM_TOKENS = 9


def make_engine(**changes: object) -> Engine:
    return Engine(model=Probe(), spec=SPEC, vocab_size=VOCAB, history_tokens=HISTORY, **changes)


def expected_answer(prompt: list[int], decoder_start: int) -> list[int]:
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(expected_next(ids, decoder_start))
    return ids[len(prompt) :]


@pytest.mark.parametrize("one_step_ahead", [False, True])
@pytest.mark.parametrize("budget", [1, 4, 64])
@pytest.mark.parametrize(("num_slots", "num_blocks"), [(5, 200), (2, 200), (5, 11)])
def test_a_model_sees_its_state_exactly(num_slots: int, num_blocks: int, budget: int, one_step_ahead: bool) -> None:
    engine = make_engine(num_slots=num_slots, num_blocks=num_blocks, budget=budget, one_step_ahead=one_step_ahead)
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, max_tokens=NUM_TOKENS)
    answers = engine.run()
    assert {name: answer.token_ids for name, answer in answers.items()} == {
        name: expected_answer(prompt, 0) for name, prompt in PROMPTS.items()
    }


@pytest.mark.parametrize("one_step_ahead", [False, True])
@pytest.mark.parametrize("budget", [1, 4, 64])
def test_trimmed_prompts_run_their_tail_in_the_decoder(budget: int, one_step_ahead: bool) -> None:
    engine = make_engine(budget=budget, one_step_ahead=one_step_ahead, replay="bounded", decoder_window=WINDOW)
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, max_tokens=NUM_TOKENS)
    answers = engine.run()
    assert {name: answer.token_ids for name, answer in answers.items()} == {
        name: expected_answer(prompt, max(0, len(prompt) - WINDOW)) for name, prompt in PROMPTS.items()
    }
