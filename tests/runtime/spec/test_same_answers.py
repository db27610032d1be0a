# SPDX-License-Identifier: Apache-2.0
"""With drafts every request gets what it gets without: tokens, log-probabilities, its end; in any company, with aborts and preemption."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest

from tests.runtime.spec.drafters import FakeDrafter
from tests.runtime.worker.driver import CONFIG, MAX_MODEL_LEN, Answer, Engine, make_prompt
from whalefall.core.request import FinishReason
from whalefall.core.seams import Drafter
from whalefall.runtime.spec.ngram import NgramDrafter

Params = dict[str, object]
SAMPLINGS: list[Params] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_p": 0.9, "seed": 4},
    {"frequency_penalty": 1.5, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 1.0, "logit_bias": {7: 5.0, 9: -100.0}, "seed": 5},
    {"ignore_eos": False, "logit_bias": {1: 6.0}, "min_tokens": 6, "temperature": 1.0, "seed": 6},
    {"stop_token_ids": (7, 8, 9, 10, 11, 12, 13, 14), "temperature": 1.0, "seed": 7},
    {"use_drafts": False, "temperature": 1.0, "seed": 8},
]


def some_requests() -> dict[str, tuple[list[int], Params]]:
    requests: dict[str, tuple[list[int], Params]] = {}
    for i in range(16):
        prompt = make_prompt(1 + 5 * i % 31, i)
        prompt = prompt * 2 if i % 3 == 0 else prompt  # something that repeats
        requests[f"r{i}"] = prompt, {**SAMPLINGS[i % len(SAMPLINGS)], "max_tokens": 4 + 7 * i % 29, "logprobs": i % 3}
    return requests


@cache
def alone(name: str) -> Answer:
    engine = Engine()
    prompt, sampling = some_requests()[name]
    engine.add(name, prompt, **sampling)
    return engine.run()[name]


def next_of_all(history: Sequence[int]) -> int:
    """What the target says next after this history of one of the requests; 0 beyond its end."""
    for name, (prompt, _) in some_requests().items():
        whole = prompt + alone(name).token_ids
        if whole[: len(history)] == list(history) and len(whole) > len(history):
            return whole[len(history)]
    return 0


DRAFTERS: dict[str, Drafter] = {
    "ngram": NgramDrafter(max_draft_tokens=8, shortest=1),
    "random": FakeDrafter(CONFIG.vocab_size),
    "good": FakeDrafter(CONFIG.vocab_size, oracle=next_of_all, skill=0.8),
    "perfect": FakeDrafter(CONFIG.vocab_size, oracle=next_of_all, skill=1.0, shortest=9),
    "draws": FakeDrafter(CONFIG.vocab_size, oracle=next_of_all, skill=0.5, probabilities=True),
}


@pytest.mark.parametrize("one_step_ahead", [False, True])
@pytest.mark.parametrize(("num_drafts", "budget", "num_blocks"), [(1, 8_192, 200), (3, 40, 200), (8, 64, 7), (4, 6, 30)])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_request_gets_what_it_gets_alone_without_drafts(
    drafter: str, num_drafts: int, budget: int, num_blocks: int, one_step_ahead: bool
) -> None:
    rng = random.Random(f"{drafter} {num_drafts}")
    engine = Engine(
        drafter=DRAFTERS[drafter],
        num_drafts=num_drafts,
        budget=budget,
        num_blocks=num_blocks,
        one_step_ahead=one_step_ahead,
        num_slots=9,
        unrolls_drafts=num_drafts == 3,
    )
    requests = some_requests()
    late = sorted(requests)[10:]

    def on_turn(turn: int) -> None:
        if turn % 3 == 2 and late:
            name = late.pop()
            engine.add(name, requests[name][0], **requests[name][1])
        if rng.random() < 0.08:
            engine.abort(rng.choice(sorted(requests)))

    for name in sorted(requests)[:10]:
        engine.add(name, requests[name][0], **requests[name][1])
    answers = engine.run(on_turn)

    for name, answer in answers.items():
        assert_same(answer, alone(name))
    if drafter in ("good", "perfect"):
        assert engine.num_accepted > 10


@pytest.mark.parametrize("one_step_ahead", [False, True])
@pytest.mark.parametrize("drafter", ["ngram", "good"])
def test_preemption_with_drafts_in_flight_loses_and_repeats_nothing(drafter: str, one_step_ahead: bool) -> None:
    names = [name for name, (_, sampling) in some_requests().items() if "stop_token_ids" not in sampling and "min_tokens" not in sampling]
    # Room for the longest of them alone, and a block for each of four.
    engine = Engine(drafter=DRAFTERS[drafter], num_drafts=4, num_blocks=7, num_slots=4, one_step_ahead=one_step_ahead)
    for name in sorted(names, key=lambda name: len(some_requests()[name][0])):
        engine.add(name, some_requests()[name][0], **some_requests()[name][1])

    answers = engine.run()

    assert engine.scheduler.num_preemptions > 0 and engine.num_accepted > 0
    for name, answer in answers.items():
        assert_same(answer, alone(name))


def assert_same(got: Answer, wanted: Answer) -> None:
    assert got.error is None
    count = len(got.token_ids)
    if got.finish_reason is not FinishReason.ABORT:
        assert (count, got.finish_reason) == (len(wanted.token_ids), wanted.finish_reason)
    assert got.token_ids == wanted.token_ids[:count]
    assert len(got.logprobs) == min(count, len(wanted.logprobs))
    for one, other in zip(got.logprobs, wanted.logprobs):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_ids is not None and other.top_ids is not None and one.top_ids.tolist() == other.top_ids.tolist()
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_a_drafter_that_copies_the_target_is_accepted_at_every_place(k: int) -> None:
    engine = Engine(drafter=DRAFTERS["perfect"], num_drafts=k)
    prompt, sampling = some_requests()["r7"]
    engine.add("r7", prompt, **{**sampling, "use_drafts": True})
    engine.run()
    assert engine.num_accepted == engine.num_drafts > 0
    assert engine.num_steps <= 2 + len(alone("r7").token_ids) // (k + 1) + 2


@pytest.mark.parametrize("one_step_ahead", [False, True])
@pytest.mark.parametrize("k", range(1, 9))
def test_the_context_limit_inside_a_block(k: int, one_step_ahead: bool) -> None:
    """Stale drafts near the limit are never judged, and nobody gets a token beyond it."""
    prompt = make_prompt(MAX_MODEL_LEN - 14, 3)
    for max_tokens, left in ((None, 14), (14, 14), (9, 9), (1, 1)):
        plain = Engine(one_step_ahead=one_step_ahead)
        plain.add("x", prompt, max_tokens=max_tokens, logprobs=2)
        wanted = plain.run()["x"]
        whole = prompt + wanted.token_ids
        perfect = FakeDrafter(CONFIG.vocab_size, oracle=lambda h, whole=whole: (whole + [0] * 9)[len(h)], skill=1.0, shortest=9)
        engine = Engine(drafter=perfect, num_drafts=k, one_step_ahead=one_step_ahead)
        engine.add("x", prompt, max_tokens=max_tokens, logprobs=2)
        answer = engine.run()["x"]
        assert len(answer.token_ids) == left and answer.finish_reason is FinishReason.LENGTH
        assert_same(answer, wanted)


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("one_step_ahead", [False, True])
def test_an_end_inside_a_block_cuts_what_was_accepted_behind_it(k: int, one_step_ahead: bool) -> None:
    """End-of-sequence and stop ids at every place of a block; log-probabilities and counts end with them."""
    prompt = make_prompt(20, 4)
    plain = Engine()
    plain.add("x", prompt, temperature=1.0, max_tokens=24)
    whole = prompt + plain.run()["x"].token_ids
    perfect = FakeDrafter(CONFIG.vocab_size, oracle=lambda h: (whole + [0] * 9)[len(h)], skill=1.0, shortest=9)
    for place in range(k % 3, 24, 4):
        token_id = whole[20 + place]
        first = whole[20:].index(token_id)
        for sampling in ({"stop_token_ids": (token_id,)}, {"stop_token_ids": (token_id,), "min_tokens": 9}):
            engine = Engine(drafter=perfect, num_drafts=k, one_step_ahead=one_step_ahead)
            plain = Engine(one_step_ahead=one_step_ahead)
            for one in (engine, plain):
                one.add("x", prompt, temperature=1.0, max_tokens=24, logprobs=0, **sampling)
            answer, wanted = engine.run()["x"], plain.run()["x"]
            assert_same(answer, wanted)
            if "min_tokens" not in sampling:
                assert len(answer.token_ids) == len(answer.logprobs) == first + 1 and answer.finish_reason is FinishReason.STOP
