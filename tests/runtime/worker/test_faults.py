# SPDX-License-Identifier: Apache-2.0
"""A fault ends one request, says why, and leaves nothing behind that could hurt the next one."""

from __future__ import annotations

import math

import pytest
import torch

from tests.runtime.worker.driver import CONFIG, Engine, ask, make_prompt
from whalefall.core.request import FinishReason
from whalefall.testing.toy_checkpoint import toy_model

POISON_ID = CONFIG.vocab_size - 1
CLEAN = [token for token in make_prompt(40) if token != POISON_ID]


def poisoned_engine(value: float, **changes: object) -> Engine:
    """The embedding of one id is not finite: whoever reads it writes poison into its own cache blocks."""
    model = toy_model()
    model.embed.weight[POISON_ID] = value  # type: ignore[attr-defined]
    return Engine(model=model, **changes)


def clean_answer(**sampling: object) -> list[int]:
    """Greedy without the poison id, which a healthy request must not draw here."""
    return ask(CLEAN, logit_bias={POISON_ID: -100.0}, **sampling).token_ids


@pytest.mark.parametrize("one_step_ahead", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_poison_ends_its_own_request_only(value: float, temperature: float, one_step_ahead: bool) -> None:
    engine = poisoned_engine(value, one_step_ahead=one_step_ahead)
    for i in range(3):
        engine.add(f"clean-{i}", CLEAN, temperature=temperature, logit_bias={POISON_ID: -100.0})
        engine.add(f"poisoned-{i}", [*CLEAN[:10], POISON_ID, *CLEAN[10:]], temperature=temperature)
    answers = engine.run()
    for i in range(3):
        assert answers[f"clean-{i}"].token_ids == clean_answer(temperature=temperature)
        assert answers[f"poisoned-{i}"].finish_reason is FinishReason.ERROR
        assert "non-finite logits in step 0, rows 0 to" in (answers[f"poisoned-{i}"].error or "")
        assert answers[f"poisoned-{i}"].token_ids == []


@pytest.mark.parametrize("one_step_ahead", [False, True])
def test_blocks_of_a_faulted_request_are_clean_for_the_next(one_step_ahead: bool) -> None:
    engine = poisoned_engine(math.nan, num_blocks=6, num_slots=2, one_step_ahead=one_step_ahead)
    for i in range(4):
        engine.add(f"poisoned-{i}", [*CLEAN, POISON_ID])
        engine.add(f"clean-{i}", CLEAN, logit_bias={POISON_ID: -100.0})
    answers = engine.run()
    assert [answers[f"clean-{i}"].token_ids for i in range(4)] == [clean_answer()] * 4
    assert all(torch.isfinite(pool[16:]).all() for pool in engine.worker.cache.growing.values())


def test_a_prompt_that_cannot_be_scored_is_a_fault() -> None:
    engine = poisoned_engine(math.nan, budget=16)
    engine.add("poisoned", [*CLEAN[:20], POISON_ID, *CLEAN[20:]], prompt_logprobs=1, max_tokens=0)
    engine.add("scored", CLEAN, prompt_logprobs=1, max_tokens=0)
    answers = engine.run()
    assert "non-finite logits in step 1, rows 16 to" in (answers["poisoned"].error or "")
    assert len(answers["poisoned"].prompt_logprobs) == 16  # those of the first chunk are sound and delivered
    assert len(answers["scored"].prompt_logprobs) == len(CLEAN) - 1


def test_nothing_left_to_draw_is_a_fault_with_its_own_words() -> None:
    engine = Engine()
    engine.add("stuck", CLEAN, min_tokens=1, stop_token_ids=tuple(range(CONFIG.vocab_size)))
    engine.add("fine", CLEAN)
    answers = engine.run()
    assert "forbid every token" in (answers["stuck"].error or "")
    assert answers["fine"].token_ids == ask(CLEAN).token_ids
