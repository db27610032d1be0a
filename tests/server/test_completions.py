# SPDX-License-Identifier: Apache-2.0
"""Raw completions, whole and streamed, from a scripted engine."""

from __future__ import annotations

import math

import pytest

from tests.server.support import asking, complete, complete_stream, engine_of, strict_json

BOS = "<｜begin▁of▁sentence｜>"


def texts(chunks: list[dict]) -> dict[int, str]:  # type: ignore[type-arg]
    joined: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    return joined


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hi", [[None, 104, 105]]),
        (["h", "i"], [[None, 104], [None, 105]]),
        ([104, 105], [[104, 105]]),
        ([[104], [105, 104]], [[104], [105, 104]]),
    ],
)
async def test_prompt_comes_in_four_forms(prompt: object, ids: list[list[int | None]]) -> None:
    engine = engine_of("a")
    whole = await complete(engine, prompt=prompt)
    bos = engine.tokenizer.bos_token_id
    assert [seen for seen, _ in engine.seen] == [[bos if i is None else i for i in row] for row in ids]
    assert [c["index"] for c in whole["choices"]] == list(range(len(ids)))
    assert whole["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_every_prompt_gets_n_answers_numbered_prompt_by_prompt() -> None:
    whole = await complete(engine_of("a", "b"), prompt=["x", "y"], n=2, echo=True)
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "xab"), (1, "xab"), (2, "yab"), (3, "yab")]
    chunks = await complete_stream(engine_of("a", "b"), prompt=["x", "y"], n=2, echo=True)
    assert texts(chunks) == {0: "xab", 1: "xab", 2: "yab", 3: "yab"}


async def test_stop_string_ends_text_tokens_and_logprobs_together() -> None:
    pieces = ("he", "llo E", "ND m", "ore", "x", "y")
    body = {"stop": ["END"], "logprobs": 0, "stream_options": {"include_usage": True}}
    whole = await complete(engine_of(*pieces, k=6), stop=["END"], logprobs=0)
    chunks = await complete_stream(engine_of(*pieces, k=6), **body)
    assert whole["choices"][0]["text"] == texts(chunks)[0] == "hello "
    assert whole["choices"][0]["logprobs"]["tokens"] == ["he", "llo E", "ND m"]
    assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == 3
    assert whole["choices"][0]["stop_reason"] == "END"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_scores_the_prompt_and_then_the_answer(stream: bool) -> None:
    body = {"prompt": [104, 105, 106], "echo": True, "logprobs": 1, "max_tokens": 1}
    if stream:
        parts = [c["logprobs"] for chunk in await complete_stream(engine_of("a"), **body) for c in chunk["choices"] if c["logprobs"]]
        logprobs = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    else:
        logprobs = (await complete(engine_of("a"), **body))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "i", "j", "a"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"] == [None, {"i": -0.5}, {"j": -0.5}, {"a": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 2, 3]


async def test_scoring_alone_generates_nothing() -> None:
    engine = engine_of("a")
    whole = await complete(engine, prompt="hi", echo=True, logprobs=0, max_tokens=0)
    choice = whole["choices"][0]
    assert choice["text"] == "hi" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == [BOS, "h", "i"] and choice["logprobs"]["text_offset"] == [0, 0, 1]
    assert whole["usage"]["completion_tokens"] == 0


async def test_second_choice_may_speak_before_the_prompt_is_scored() -> None:
    whole = await complete(engine_of("a"), prompt="hi", echo=True, logprobs=0, n=3)
    assert [c["logprobs"]["token_logprobs"] for c in whole["choices"]] == [[None, -0.5, -0.5, -0.5, -0.5]] * 3


async def test_minus_infinity_becomes_a_number_in_answer_and_prompt() -> None:
    engine = engine_of("a", rival_logprob=-math.inf)
    async with asking(engine) as client:
        answer = await client.post(
            "/v1/completions", json={"prompt": [104, 105], "echo": True, "logprobs": 3, "max_tokens": 1, "prompt_logprobs": 2}
        )
    choice = strict_json(answer.text)["choices"][0]
    assert sorted(choice["logprobs"]["top_logprobs"][1].values()) == [-9999.0, -9999.0, -0.5]
    assert sorted(choice["logprobs"]["top_logprobs"][2].values()) == [-9999.0, -9999.0, -0.5]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["105"] == {"logprob": -0.5, "rank": 1, "decoded_token": "i"}


async def test_parts_of_a_character_stay_apart_as_keys() -> None:
    whale = "🐋".encode()
    choice = (await complete(engine_of(whale[:2], whale[2:]), logprobs=0))["choices"][0]
    assert choice["text"] == "🐋"
    assert choice["logprobs"]["tokens"][:2] == [r"bytes:\xf0\x9f", r"bytes:\x90\x8b"]
    assert choice["logprobs"]["text_offset"][:2] == [0, 0]


async def test_control_tokens_in_a_raw_prompt_count_unless_said_otherwise() -> None:
    engine = engine_of("a")
    user = engine.tokenizer.token_to_id("<｜User｜>")
    await complete(engine, prompt="<｜User｜>x")
    await complete(engine, prompt="<｜User｜>x", parse_special_tokens=False, add_special_tokens=False)
    assert engine.seen[0][0] == [engine.tokenizer.bos_token_id, user, ord("x")]
    assert not engine.tokenizer.special_ids & set(engine.seen[1][0])


async def test_token_ids_come_on_request() -> None:
    engine = engine_of("a", "b")
    choice = (await complete(engine, prompt=[104], return_token_ids=True))["choices"][0]
    assert engine.tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == "ab" and choice["prompt_token_ids"] == [104]
    chunks = await complete_stream(engine_of("a", "b"), return_token_ids=True)
    assert [len(c["token_ids"]) for chunk in chunks for c in chunk["choices"] if "token_ids" in c] == [1, 1]


async def test_usage_so_far_comes_with_every_chunk_on_request() -> None:
    chunks = await complete_stream(engine_of("a", "b"), stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
