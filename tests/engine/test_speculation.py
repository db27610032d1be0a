# SPDX-License-Identifier: Apache-2.0
"""Speculation from the outside: the embedded model through `LLM`, its options, its counters, stop strings across accepted drafts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from whalefall import LLM, SamplingParams
from whalefall.core.errors import ConfigError
from whalefall.engine.embedded import embedded_model_dir

PROMPTS = ["The cat sat on the mat. The cat sat on", "One two three one two three one", "A whale"]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 40},
    "drawn": {"temperature": 0.8, "top_p": 0.95, "seed": 5, "max_tokens": 40},
    "penalties": {"temperature": 0.0, "frequency_penalty": 0.6, "max_tokens": 24},
    "off": {"temperature": 0.0, "max_tokens": 16, "use_drafts": False},
}


@pytest.fixture(params=[{}, {"async_scheduling": True}, {"replay": "exact"}], ids=["serial", "ahead", "exact replay"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    made = LLM(embedded_model_dir(), draft="fixed:4", drafter="ngram", **request.param)
    yield made
    made.shutdown()


@cache
def plain() -> dict[str, list[tuple[list[int], str, str | None]]]:
    llm = LLM(embedded_model_dir())
    found = {name: answers(llm, **sampling) for name, sampling in SAMPLINGS.items()}
    llm.shutdown()
    return found


def answers(llm: LLM, **sampling: Any) -> list[tuple[list[int], str, str | None]]:
    outputs = llm.generate(PROMPTS, SamplingParams(logprobs=1, **sampling), use_tqdm=False)
    for output in outputs:
        one = output.outputs[0]
        assert len(one.logprobs or ()) == len(one.token_ids)
    return [(list(o.outputs[0].token_ids), o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]


def test_answers_are_those_without_drafts(llm: LLM) -> None:
    for name, sampling in SAMPLINGS.items():
        assert answers(llm, **sampling) == plain()[name], name
    drafts = llm.stats().engine.drafts
    assert drafts is not None and drafts.draft_tokens > drafts.accepted_tokens > 20
    assert sum(drafts.accepted_per_place) == drafts.accepted_tokens and len(drafts.accepted_per_place) == 4
    assert drafts.accepted_per_place == sorted(drafts.accepted_per_place, reverse=True)


def test_a_stop_string_inside_and_across_accepted_drafts(llm: LLM) -> None:
    text = plain()["greedy"][0][1]
    for first in range(4, len(text) - 6, 9):
        stop = text[first : first + 4]
        outputs = llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=40, stop=[stop], logprobs=0), use_tqdm=False)
        one = outputs[0].outputs[0]
        assert one.text == text[: text.index(stop)] and one.finish_reason == "stop" and one.stop_reason == stop
        assert len(one.logprobs or ()) == len(one.token_ids)


def test_a_request_that_opts_out_has_no_drafts(llm: LLM) -> None:
    before = llm.stats().engine.drafts
    answers(llm, **SAMPLINGS["off"])
    after = llm.stats().engine.drafts
    assert before is not None and after is not None and after.num_drafts == before.num_drafts


def test_a_wrong_length_is_refused_with_the_range() -> None:
    with pytest.raises(ConfigError, match="fixed:K"):
        LLM(embedded_model_dir(), draft="3")
    with pytest.raises(ConfigError, match="drafts 1 to 16 tokens"):
        LLM(embedded_model_dir(), draft="fixed:99", drafter="ngram")


@pytest.mark.parametrize("draft", ["off", "fixed:3"])
def test_processed_log_probabilities_are_those_of_the_choice(draft: str) -> None:
    """A forbidden token is impossible, what is kept sums to one; the tokens do not depend on the mode, nor the values on drafts."""
    params = SamplingParams(temperature=0.7, top_k=3, seed=1, max_tokens=12, logprobs=5, logit_bias={5: -100.0}, frequency_penalty=0.5)
    found = {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        llm = LLM(embedded_model_dir(), draft=draft, drafter="ngram", logprobs_mode=mode)
        found[mode] = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        llm.shutdown()
    for raw, processed in zip(found["raw_logprobs"], found["processed_logprobs"], strict=True):
        assert raw.token_ids == processed.token_ids
        for token_id, entry in zip(processed.token_ids, processed.logprobs or ()):
            chances = sorted((math.exp(value.logprob) for value in entry.values()), reverse=True)
            assert entry[token_id].logprob > -math.inf and sum(chances[:3]) == pytest.approx(1, abs=1e-5)
            assert not any(chances[3:])
        assert all(sum(math.exp(v.logprob) for v in entry.values()) < 1 for entry in raw.logprobs or ())


def test_deterministic_gives_the_same_bits_in_any_company() -> None:
    with pytest.raises(ConfigError, match="replay=exact"):
        LLM(embedded_model_dir(), deterministic=True)
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=8, logprobs=3)
    found = []
    for options in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 5}, {"draft": "fixed:3", "drafter": "ngram"}):
        llm = LLM(embedded_model_dir(), replay="exact", deterministic=True, **options)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        found.append([[(t, entry[t].logprob) for t, entry in zip(o.outputs[0].token_ids, o.outputs[0].logprobs or ())] for o in outputs])
        llm.shutdown()
    assert found[0] == found[1] == found[2]
