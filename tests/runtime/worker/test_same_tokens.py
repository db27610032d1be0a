# SPDX-License-Identifier: Apache-2.0
"""Same tokens, whatever the road: chunks, company, preemption, one step ahead; and the same numbers as a plain forward."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.runtime.worker.driver import CONFIG, Answer, Engine, ask, make_prompt, plain_greedy, plain_logits

LENGTHS = (1, 2, 15, 16, 17, 33, 70)
"""Around the border of a 16-token block, and a few blocks."""
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5, "seed": 7}


@cache
def lone_answer(length: int, is_sampled: bool) -> tuple[int, ...]:
    return tuple(ask(make_prompt(length), **(SAMPLED if is_sampled else {})).token_ids)


def crowd(engine: Engine) -> dict[str, Answer]:
    for length in LENGTHS:
        engine.add(f"greedy-{length}", make_prompt(length))
        engine.add(f"sampled-{length}", make_prompt(length), **SAMPLED)
    return engine.run()


def assert_all_as_alone(answers: dict[str, Answer]) -> None:
    got = {name: tuple(answer.token_ids) for name, answer in answers.items()}
    expected = {f"{kind}-{length}": lone_answer(length, kind == "sampled") for length in LENGTHS for kind in ("greedy", "sampled")}
    assert got == expected


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_answer_equals_a_plain_forward(length: int) -> None:
    assert list(lone_answer(length, False)) == plain_greedy(make_prompt(length), 12)


@pytest.mark.parametrize("one_step_ahead", [False, True])
@pytest.mark.parametrize("budget", [1, 7, 64, 8_192])
def test_chunks_company_and_look_ahead_change_no_token(budget: int, one_step_ahead: bool) -> None:
    assert_all_as_alone(crowd(Engine(budget=budget, one_step_ahead=one_step_ahead)))


@pytest.mark.parametrize("one_step_ahead", [False, True])
@pytest.mark.parametrize("budget", [24, 64, 200])
def test_preemption_changes_no_token(budget: int, one_step_ahead: bool) -> None:
    engine = Engine(budget=budget, one_step_ahead=one_step_ahead, num_blocks=8)
    answers = crowd(engine)
    assert engine.scheduler.num_preemptions > 0
    assert_all_as_alone(answers)


LONG = SAMPLED | {"max_tokens": 48, "repetition_penalty": 1.2}


@cache
def lone_long_answer(length: int) -> tuple[int, ...]:
    return tuple(ask(make_prompt(length), **LONG).token_ids)


@pytest.mark.parametrize("one_step_ahead", [False, True])
def test_preemption_in_the_middle_of_long_answers_changes_no_token(one_step_ahead: bool) -> None:
    engine = Engine(budget=50, one_step_ahead=one_step_ahead, num_blocks=8)
    for length in range(10, 16):
        engine.add(str(length), make_prompt(length), **LONG, logprobs=1)
    answers = engine.run()
    assert engine.scheduler.num_preemptions >= 3
    for length in range(10, 16):
        assert tuple(answers[str(length)].token_ids) == lone_long_answer(length)
        assert tuple(report.token_id for report in answers[str(length)].logprobs) == lone_long_answer(length)


def test_slots_reused_many_times_change_no_token() -> None:
    assert_all_as_alone(crowd(Engine(num_slots=2)))


@pytest.mark.parametrize("budget", [1, 3, 7, 64, 8_192])
@pytest.mark.parametrize("length", [1, 16, 40])
def test_logits_equal_a_plain_forward_at_every_position(length: int, budget: int) -> None:
    prompt = make_prompt(length)
    answer = ask(prompt, engine=Engine(budget=budget), prompt_logprobs=-1, logprobs=-1, max_tokens=5)
    expected_TV = plain_logits([*prompt, *answer.token_ids])[:-1].log_softmax(-1).numpy()
    got_TV = np.stack([token.top_logprobs for token in (*answer.prompt_logprobs, *answer.logprobs)])
    assert np.abs(got_TV - expected_TV).max() < 1e-4


@pytest.mark.parametrize("budget", [16, 8_192])
def test_prompt_scores_in_a_crowd_equal_a_plain_forward(budget: int) -> None:
    engine = Engine(budget=budget, num_blocks=60)
    prompts = {str(length): make_prompt(length, seed=1) for length in range(1, 100, 14)}
    for i, (name, prompt) in enumerate(prompts.items()):
        engine.add(name, prompt, prompt_logprobs=i % 3, max_tokens=i % 2, temperature=1.0)
        engine.add("neighbour-" + name, prompt)
    answers = engine.run()
    for i, (name, prompt) in enumerate(prompts.items()):
        scores = answers[name].prompt_logprobs
        expected_TV = plain_logits(prompt)[:-1].log_softmax(-1)
        assert [score.token_id for score in scores] == prompt[1:]
        assert [len(score.top_logprobs) for score in scores] == [i % 3] * (len(prompt) - 1)
        given = [row[token].item() for row, token in zip(expected_TV, prompt[1:])]
        assert [score.logprob for score in scores] == pytest.approx(given, abs=1e-4)
        assert len(answers[name].token_ids) == i % 2


def test_reported_logprobs_are_raw_whatever_shapes_the_draw() -> None:
    prompt = make_prompt(20)
    answer = ask(prompt, temperature=1.5, top_k=3, presence_penalty=2.0, logit_bias={5: 50.0}, seed=3, logprobs=4, max_tokens=6)
    expected_TV = plain_logits([*prompt, *answer.token_ids]).log_softmax(-1)
    for i, report in enumerate(answer.logprobs):
        row_V = expected_TV[len(prompt) - 1 + i]
        assert report.token_id == answer.token_ids[i]
        assert report.logprob == pytest.approx(row_V[report.token_id].item(), abs=1e-4)
        assert report.rank == 1 + int((row_V > row_V[report.token_id]).sum())
        assert report.top_ids is not None
        assert report.top_ids.tolist() == row_V.topk(4).indices.tolist()


def test_seed_decides_and_choices_differ() -> None:
    prompt = make_prompt(9)
    first = [tuple(ask(prompt, temperature=1.0, seed=seed, max_tokens=20).token_ids) for seed in (7, 8, 9)]
    engine = Engine(budget=32)
    for seed in (7, 8, 9):
        engine.add(str(seed), prompt, temperature=1.0, seed=seed, max_tokens=20)
    for i in range(10):
        engine.add(f"other-{i}", make_prompt(10 + i, seed=2), temperature=1.0, seed=i)
    again = engine.run()
    assert first == [tuple(again[str(seed)].token_ids) for seed in (7, 8, 9)]
    assert len(set(first)) == 3


def test_later_tokens_never_change_earlier_scores() -> None:
    prompt = make_prompt(40)
    whole = ask(prompt, prompt_logprobs=-1, max_tokens=0).prompt_logprobs
    for changed in (17, 32, 39):
        other = [*prompt[:changed], (prompt[changed] + 1) % CONFIG.vocab_size, *prompt[changed + 1 :]]
        scores = ask(other, prompt_logprobs=-1, max_tokens=0).prompt_logprobs
        for before, after in zip(whole[:changed], scores[:changed]):
            assert np.abs(before.top_logprobs - after.top_logprobs).max() < 1e-4
