# SPDX-License-Identifier: Apache-2.0
"""Chat answers, whole and streamed, from a scripted engine."""

from __future__ import annotations

import json

import pytest

from tests.server.support import HI, PLAIN, asking, chat, chat_stream, engine_of, events, finish_reasons, joined, raw_stream

EOS = "<｜end▁of▁sentence｜>"
CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="bash">\n<｜DSML｜ parameter name="command" string="true">ls -l</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
TOOLS = [
    {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}
]


async def test_stream_has_these_very_bytes() -> None:
    text = await raw_stream(engine_of("Hel", "lo"), "/v1/chat/completions", {**PLAIN, "stream_options": {"include_usage": True}})
    chunks = events(text)
    head = {"id": chunks[0]["id"], "object": "chat.completion.chunk", "created": chunks[0]["created"], "model": "whale"}
    assert head["id"].startswith("chatcmpl-")

    def chunk(delta: dict[str, str], reason: str | None = None, **more: object) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
        return "data: " + json.dumps({**head, "choices": [choice]}, separators=(",", ":")) + "\n\n"

    usage = {
        "prompt_tokens": chunks[-1]["usage"]["prompt_tokens"],
        "completion_tokens": 3,
        "total_tokens": chunks[-1]["usage"]["total_tokens"],
    }
    usage |= {"prompt_tokens_details": {"cached_tokens": 0}, "prompt_cache_hit_tokens": 0}
    usage |= {"prompt_cache_miss_tokens": usage["prompt_tokens"], "completion_tokens_details": {"reasoning_tokens": 0}}
    assert text == (
        chunk({"role": "assistant", "content": ""})
        + chunk({"content": "Hel"})
        + chunk({"content": "lo"})
        + chunk({}, "stop", stop_reason=None)
        + "data: " + json.dumps({**head, "choices": [], "usage": usage}, separators=(",", ":")) + "\n\n"
        + "data: [DONE]\n\n"
    )  # fmt: skip


@pytest.mark.parametrize("k", [1, 2, 5])
async def test_streamed_deltas_join_to_the_whole_answer(k: int) -> None:
    pieces = ("let ", "me ", "</think>", "an", "swer", CALL[:40], CALL[40:90], CALL[90:])
    body = {"messages": HI, "tools": TOOLS, "thinking": {"type": "enabled"}}
    whole = (await chat(engine_of(*pieces, k=k), **body))["choices"][0]
    chunks = await chat_stream(engine_of(*pieces, k=k), **body)
    assert whole["message"]["reasoning_content"] == joined(chunks, "reasoning_content") == "let me "
    assert whole["message"]["content"] == joined(chunks) == "answer"
    assert finish_reasons(chunks) == [whole["finish_reason"]] == ["tool_calls"]
    fragments = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert fragments[0]["function"]["name"] == "bash" and fragments[0]["id"].startswith("call_")
    arguments = "".join(fragment["function"]["arguments"] for fragment in fragments)
    assert arguments == whole["message"]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls -l"}'


async def test_one_chunk_per_step_and_choice() -> None:
    chunks = await chat_stream(engine_of("a", "b", "c", "d", k=2), n=2)
    spoken = [c["index"] for chunk in chunks for c in chunk["choices"] if c["delta"].get("content")]
    assert spoken == [0, 1, 0, 1]
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_usage_counts_the_prompt_once_for_three_choices() -> None:
    one, three = await chat(engine_of("a", "b")), await chat(engine_of("a", "b"), n=3, seed=7)
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 9
    assert [(c["index"], c["finish_reason"]) for c in three["choices"]] == [(0, "stop"), (1, "stop"), (2, "stop")]


# --- thinking: prompt and parser agree (B1, B2) ---


@pytest.mark.parametrize(
    ("body", "is_reasoning"),
    [
        ({}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
async def test_answer_lands_where_the_prompt_left_off(body: dict[str, object], is_reasoning: bool) -> None:
    engine = engine_of("hello")
    async with asking(engine) as client:
        answer = (await client.post("/v1/chat/completions", json={"messages": HI, **body})).json()
    prompt = engine.tokenizer.decode(engine.seen[0][0], skip_special_tokens=False)
    assert prompt.endswith("<think>" if is_reasoning else "</think>")
    message = answer["choices"][0]["message"]
    assert message.get("reasoning_content", "") == ("hello" if is_reasoning else "")
    assert message["content"] == ("" if is_reasoning else "hello")


async def test_end_marker_reaches_no_field() -> None:
    body = {"thinking": {"type": "enabled"}, "ignore_eos": True}
    whole = await chat(engine_of("Good", " morning", EOS, "!"), **body)
    chunks = await chat_stream(engine_of("Good", " morning", EOS, "!"), **body)
    assert whole["choices"][0]["message"]["reasoning_content"] == joined(chunks, "reasoning_content") == "Good morning!"
    assert EOS not in json.dumps([whole, chunks], ensure_ascii=False)


async def test_special_tokens_are_shown_on_request() -> None:
    whole = await chat(engine_of("a", EOS, "b"), skip_special_tokens=False)
    assert whole["choices"][0]["message"]["content"] == f"a{EOS}b"


async def test_spelled_control_tokens_stay_text() -> None:
    engine = engine_of("x")
    await chat(engine, messages=[{"role": "user", "content": "<｜User｜>x" + EOS}])
    control = [engine.tokenizer.id_to_token(i) for i in engine.seen[0][0] if i in engine.tokenizer.special_ids]
    assert control == ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>"]


# --- stop strings (G5, G6) ---


async def test_nothing_behind_a_stop_string_is_reported() -> None:
    pieces = ("he", "llo E", "ND m", "ore", "x", "y")
    body = {"stop": ["END"], "logprobs": True}
    whole = await chat(engine_of(*pieces, k=6), **body)
    chunks = await chat_stream(engine_of(*pieces, k=6), **body, stream_options={"include_usage": True})
    entries = [e["token"] for e in whole["choices"][0]["logprobs"]["content"]]
    streamed = [e["token"] for chunk in chunks for c in chunk["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert whole["choices"][0]["message"]["content"] == joined(chunks) == "hello "
    assert entries == streamed == ["he", "llo E", "ND m"]
    assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == 3
    assert whole["choices"][0]["finish_reason"] == "stop" and whole["choices"][0]["stop_reason"] == "END"
    assert "ore" not in json.dumps([whole, chunks])


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(
    ("pieces", "stop", "content"),
    [
        (("hello wo", "rld EN", "D more"), ["END"], "hello world "),
        (("hello EN",), ["END"], "hello EN"),
        (("hello E", "ND"), ["EN", "END"], "hello "),
        (("x", "abc", "d"), ["abc", "b"], "xa"),
    ],
)
async def test_text_is_held_back_only_while_a_stop_string_is_possible(
    pieces: tuple[str, ...], stop: list[str], content: str, k: int
) -> None:
    whole = await chat(engine_of(*pieces, k=k), stop=stop)
    chunks = await chat_stream(engine_of(*pieces, k=k), stop=stop)
    assert whole["choices"][0]["message"]["content"] == joined(chunks) == content
    assert finish_reasons(chunks) == ["stop"]


async def test_stop_string_inside_the_reasoning_is_no_stop() -> None:
    pieces = ("a END b", "</think>", "c E", "ND d")
    choice = (await chat(engine_of(*pieces), thinking={"type": "enabled"}, stop="END"))["choices"][0]
    assert choice["message"]["reasoning_content"] == "a END b"
    assert choice["message"]["content"] == "c "
    assert choice["stop_reason"] == "END"


async def test_stop_string_ends_the_choice_in_the_engine_as_an_ordinary_end() -> None:
    engine = engine_of("a", "END", *["x"] * 50)
    await chat(engine, stop="END", n=2)
    assert engine.open_requests == set() and engine.aborted == []
    assert engine.stats().finished == {"stop": 2}


async def test_stop_string_may_be_kept() -> None:
    choice = (await chat(engine_of("a E", "ND b"), stop=["END"], include_stop_str_in_output=True))["choices"][0]
    assert choice["message"]["content"] == "a END"


# --- logprobs (G3), empty answers (H3), ends (G9) ---


async def test_minus_infinity_becomes_a_number() -> None:
    engine = engine_of("a", rival_logprob=float("-inf"))
    entry = (await chat(engine, logprobs=True, top_logprobs=3))["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == "a" and entry["bytes"] == [97] and entry["logprob"] == -0.5
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -9999.0, -9999.0]


async def test_half_characters_have_their_bytes() -> None:
    whale = "🐋".encode()
    choice = (await chat(engine_of(whale[:2], whale[2:]), logprobs=True))["choices"][0]
    assert choice["message"]["content"] == "🐋"
    assert [bytes(entry["bytes"]) for entry in choice["logprobs"]["content"][:2]] == [whale[:2], whale[2:]]


async def test_immediate_end_is_an_empty_answer_of_one_token() -> None:
    engine = engine_of()
    history = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "bash", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ]
    whole = await chat(engine, messages=history)
    assert whole["usage"]["completion_tokens"] == 1
    assert whole["choices"][0]["message"]["content"] == "" and whole["choices"][0]["finish_reason"] == "stop"
    assert engine.stats().empty_answers == 1


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
async def test_every_cap_inside_a_tool_call_ends_the_stream_properly(limit: int, thinking: str) -> None:
    pieces = ("t", "</think>", "ok", *(CALL[i : i + 20] for i in range(0, len(CALL), 20)))
    body = {"tools": TOOLS, "thinking": {"type": thinking}, "max_tokens": limit, "stream_options": {"include_usage": True}}
    chunks = await chat_stream(engine_of(*pieces), **body)
    assert finish_reasons(chunks) == ["length"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == limit


async def test_fault_in_mid_stream_sends_one_error_and_ends() -> None:
    chunks = await chat_stream(engine_of("a", "b", "c", step_s=0.0, fails_at=2))
    assert joined([c for c in chunks if "choices" in c]) == "ab"
    assert [set(c) for c in chunks if "error" in c] == [{"error"}]
    assert chunks[-1]["error"]["type"] == "internal_error" and "scripted fault" in chunks[-1]["error"]["message"]


async def test_fault_before_the_first_byte_has_a_real_status() -> None:
    async with asking(engine_of("a", fails_at=0)) as client:
        for stream in (False, True):
            answer = await client.post("/v1/chat/completions", json={**PLAIN, "stream": stream})
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "generation_failed"


# --- other formats and roles ---


async def test_plain_format_concatenates_and_passes_everything_on() -> None:
    engine = engine_of("\n", "<th", "ink> <｜DS", chat_format="none")
    whole = await chat(engine, messages=[{"role": "developer", "content": "Be brief."}, *HI])
    text = engine.tokenizer.decode(engine.seen[0][0], skip_special_tokens=True)
    assert text == "system: Be brief.\nuser: hi\nassistant:"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "\n<think> <｜DS"}


async def test_developer_is_read_as_system() -> None:
    engine = engine_of("x")
    await chat(engine, messages=[{"role": "developer", "content": "D"}, *HI])
    await chat(engine, messages=[{"role": "system", "content": "D"}, *HI])
    assert engine.seen[0][0] == engine.seen[1][0]


async def test_sampling_arrives_as_asked() -> None:
    engine = engine_of("x")
    await chat(engine, temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=5, logit_bias={"7": -100}, max_completion_tokens=9, max_tokens=4)
    params = engine.seen[0][1]
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.0, 0.5, 3, 0.1, 5)
    assert params.logit_bias == {7: -100} and params.max_tokens == 9


# --- continuing an answer, usage in streams ---


@pytest.mark.parametrize("more", [{"prefix": True}, None])
async def test_a_last_assistant_message_can_be_continued(more: dict[str, bool] | None) -> None:
    turn = {"role": "assistant", "content": "1, 2,", **(more or {})}
    body = {"messages": [*HI, turn], **({} if more else {"continue_final_message": True})}
    engine = engine_of("\n3")
    whole = await chat(engine, **body)
    assert engine.tokenizer.decode(engine.seen[0][0], skip_special_tokens=False).endswith("1, 2,")
    assert whole["choices"][0]["message"]["content"] == joined(await chat_stream(engine_of("\n3"), **body)) == "\n3"


async def test_usage_so_far_comes_with_every_chunk_on_request() -> None:
    chunks = await chat_stream(engine_of("a", "b"), stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == 3
    assert all("usage" not in chunk for chunk in await chat_stream(engine_of("a", "b")))
