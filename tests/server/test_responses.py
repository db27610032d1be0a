# SPDX-License-Identifier: Apache-2.0
"""The Responses protocol: items, events in their order, the store, chains, the background, cancel, refusals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.named_events import named_events, post, responses, responses_stream
from tests.server.support import asking, engine_of, raw_stream
from tests.text.reports import PARAMETERS, block, call, invoke, parameter
from whalefall.testing.scripted import ScriptedLLM

TOOLS = [{"type": "function", "name": "bash", "description": "d", "parameters": PARAMETERS}]
OFF = {"reasoning": {"effort": "none"}}
PATH = "/v1/responses"


def prompt_of(engine: ScriptedLLM, index: int = -1) -> str:
    return engine.tokenizer.decode(engine.seen[index][0], skip_special_tokens=False)


async def test_events_come_in_this_very_order() -> None:
    events = await responses_stream(engine_of("th", "</think>", "an", "swer", call("ls")), tools=TOOLS)
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"),
        *("output_item.done", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert [e["output_index"] for e in events if e["type"].endswith("output_item.done")] == [0, 1, 2]
    ids = [e["item"]["id"] for e in events if e["type"].endswith("output_item.added")]
    assert len(set(ids)) == 3


async def test_an_event_has_these_very_bytes() -> None:
    text = await raw_stream(engine_of("hello"), PATH, {"input": "hi", **OFF})
    item = json.loads(text.split("\n\n")[2].split("\n")[1].removeprefix("data: "))["item"]["id"]
    assert text.split("\n\n")[4] == (
        'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","content_index":0,"delta":"hello",'
        f'"item_id":"{item}","logprobs":[],"output_index":0,"sequence_number":4}}'
    )
    assert text.endswith("}\n\n") and "[DONE]" not in text


@pytest.mark.parametrize("k", [1, 3, 9])
async def test_the_last_event_the_whole_answer_and_the_joined_deltas_agree(k: int) -> None:
    calls = block(invoke(parameter("ls -l"), parameter("5", "n", "false")), invoke(parameter("b")))
    pieces = ("let ", "me", "</think>", "an", "swer", *(calls[i : i + 9] for i in range(0, len(calls), 9)))
    whole = await responses(engine_of(*pieces, k=k), tools=TOOLS)
    events = await responses_stream(engine_of(*pieces, k=k), tools=TOOLS)
    last = events[-1]["response"]
    for body in (whole, last):
        reasoning, message, *found = body["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "let me"}]
        assert message["content"][0]["text"] == "answer"
        assert [json.loads(c["arguments"]) for c in found] == [{"command": "ls -l", "n": 5}, {"command": "b"}]
        assert len({c["call_id"] for c in found}) == 2 and body["status"] == "completed"
    joined: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
    assert list(joined.values()) == ["let me", "answer", *(c["arguments"] for c in last["output"][2:])]
    assert whole["usage"] == last["usage"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 3


async def test_one_delta_per_step() -> None:
    events = await responses_stream(engine_of("a", "b", "c", "d", k=2), **OFF)
    assert [event["delta"] for event in events if event["type"] == "response.output_text.delta"] == ["ab", "cd"]


async def test_a_length_cap_is_an_incomplete_answer() -> None:
    events = await responses_stream(engine_of("a", "b", "c"), **OFF, max_output_tokens=2)
    whole = await responses(engine_of("a", "b", "c"), **OFF, max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete"
    for body in (whole, events[-1]["response"]):
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert body["output"][0]["content"][0]["text"] == "ab" and body["usage"]["output_tokens"] == 2


async def test_logprobs_come_with_the_text_they_belong_to() -> None:
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = await responses_stream(engine_of("th", "</think>", "an", "swer"), **body)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in event["logprobs"]] for event in deltas] == [["an"], ["swer"]]
    assert all(len(entry["top_logprobs"]) == 2 for event in deltas for entry in event["logprobs"])
    final = events[-1]["response"]["output"][1]["content"][0]["logprobs"]
    assert [entry["token"] for entry in final] == ["an", "swer"]


async def test_what_was_asked_is_reported() -> None:
    asked = {"metadata": {"a": "b"}, "temperature": 0.25, "top_p": 0.5, "max_output_tokens": 9, "instructions": "I", "user": "u"}
    engine = engine_of("x")
    body = await responses(engine, **asked, tools=TOOLS, parallel_tool_calls=False)
    assert {name: body[name] for name in asked} == asked
    assert body["parallel_tool_calls"] is False and body["tools"][0]["name"] == "bash" and body["store"] is True
    sampling = engine.seen[0][1]
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.25, 0.5, 9)
    assert "I<" in prompt_of(engine).replace("\n\nI\n", "I<")


# --- the store ---


async def test_stored_answers_can_be_fetched_and_deleted() -> None:
    async with asking(engine_of("an")) as client:
        made = (await client.post(PATH, json={"input": "hi", **OFF})).json()
        assert (await client.get(f"{PATH}/{made['id']}")).json() == made
        items = (await client.get(f"{PATH}/{made['id']}/input_items")).json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["hi"]
        assert (await client.post(f"{PATH}/{made['id']}/cancel")).json() == made  # has ended: stays as it is
        assert (await client.delete(f"{PATH}/{made['id']}")).json() == {"id": made["id"], "object": "response", "deleted": True}
        for gone in (client.get(f"{PATH}/{made['id']}"), client.delete(f"{PATH}/{made['id']}"), client.get(f"{PATH}/resp_x")):
            answer = await gone
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "response_not_found"
        kept = (await client.post(PATH, json={"input": "hi", "store": False})).json()
        assert (await client.get(f"{PATH}/{kept['id']}")).status_code == 404


async def test_the_store_is_bounded_by_count_and_bytes() -> None:
    for limits in ({"max_stored_responses": 3}, {"max_stored_bytes": 5000}):
        async with asking(engine_of("an"), **limits) as client:
            ids = [(await client.post(PATH, json={"input": "hi", **OFF})).json()["id"] for _ in range(8)]
            found = [(await client.get(f"{PATH}/{i}")).status_code for i in ids]
            store = client.app.state.responses  # type: ignore[attr-defined]
        assert found[-1] == 200 and found[0] == 404 and sorted(found, reverse=True) == found
        assert len(store) <= 3 or store.num_bytes <= 5000


async def test_a_chain_of_answers_is_one_conversation() -> None:
    engine = engine_of("th", "</think>", "an")
    async with asking(engine) as client:
        first = (await client.post(PATH, json={"input": "one", "instructions": "I"})).json()
        second = (await client.post(PATH, json={"input": "two", "previous_response_id": first["id"]})).json()
        await client.post(PATH, json={"input": "three", "previous_response_id": second["id"]})
    assert second["previous_response_id"] == first["id"]
    prompt = prompt_of(engine)
    assert prompt.index("one") < prompt.index("two") < prompt.index("three") and prompt.count("</think>an") == 2
    assert "I<｜User｜>" in prompt_of(engine, 0) and "I<｜User｜>" not in prompt  # instructions count for one answer only


async def test_a_tool_result_may_follow_by_id() -> None:
    engine = engine_of("</think>", call("ls"))
    async with asking(engine) as client:
        first = (await client.post(PATH, json={"input": "go", "tools": TOOLS})).json()
        made = first["output"][-1]
        result = {"type": "function_call_output", "call_id": made["call_id"], "output": "OUT"}
        again = await client.post(PATH, json={"input": [result], "tools": TOOLS, "previous_response_id": first["id"]})
        assert again.status_code == 200
        missing = await client.post(PATH, json={"input": "x", "tools": TOOLS, "previous_response_id": first["id"]})
        assert missing.status_code == 400 and made["call_id"] in missing.json()["error"]["message"]
        unknown = await client.post(PATH, json={"input": "x", "previous_response_id": "resp_no"})
        assert unknown.status_code == 404 and unknown.json()["error"]["param"] == "previous_response_id"
    assert "<tool_result>OUT</tool_result>" in prompt_of(engine)


# --- background, cancel, leaving ---


async def until(client: Any, response_id: str, status: str) -> dict[str, Any]:
    while True:
        body = (await client.get(f"{PATH}/{response_id}")).json()
        if body["status"] == status:
            return body  # type: ignore[no-any-return]
        await asyncio.sleep(0.001)


async def test_a_background_answer_goes_on_alone_and_can_be_followed() -> None:
    engine = engine_of("a", "b", "c")
    engine.gate.clear()
    async with asking(engine) as client:
        made = (await client.post(PATH, json={"input": "hi", **OFF, "background": True})).json()
        assert made["status"] == "in_progress" and made["background"] is True and made["output"] == []
        early = await client.post(PATH, json={"input": "x", "previous_response_id": made["id"]})
        assert early.status_code == 400 and "still being answered" in early.json()["error"]["message"]
        engine.gate.set()
        done = await until(client, made["id"], "completed")
        assert done["output"][0]["content"][0]["text"] == "abc"
        events = named_events((await client.get(f"{PATH}/{made['id']}?stream=true")).text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        rest = named_events((await client.get(f"{PATH}/{made['id']}?stream=true&starting_after=4")).text)
        assert rest == events[5:] and events[-1]["response"] == done
    assert engine.open_requests == set()


async def test_a_background_answer_streamed_outlives_its_reader() -> None:
    engine = engine_of("a", "b", "c")
    async with asking(engine) as client:
        text = (await client.post(PATH, json={"input": "hi", **OFF, "background": True, "stream": True})).text
        events = named_events(text)
        assert events[-1]["type"] == "response.completed"
        assert (await client.get(f"{PATH}/{events[0]['response']['id']}")).json() == events[-1]["response"]


@pytest.mark.parametrize("way", ["cancel", "delete"])
async def test_cancel_ends_the_answer_in_the_engine(way: str) -> None:
    engine = engine_of(*["x"] * 5000, step_s=0.001)
    async with asking(engine) as client:
        made = (await client.post(PATH, json={"input": "hi", **OFF, "background": True})).json()
        while not engine.open_requests:
            await asyncio.sleep(0.001)
        if way == "cancel":
            body = (await client.post(f"{PATH}/{made['id']}/cancel")).json()
            assert body["status"] == "cancelled" and body["usage"]["output_tokens"] < 5000
            events = named_events((await client.get(f"{PATH}/{made['id']}?stream=true")).text)
            assert events[-1]["response"] == body
        else:
            assert (await client.delete(f"{PATH}/{made['id']}")).status_code == 200
        assert engine.open_requests == set()


async def test_a_background_fault_is_told_by_the_stored_answer() -> None:
    async with asking(engine_of("a", "b", fails_at=1)) as client:
        made = (await client.post(PATH, json={"input": "hi", **OFF, "background": True})).json()
        failed = await until(client, made["id"], "failed")
        assert failed["error"]["code"] == "server_error" and "scripted fault" in failed["error"]["message"]


async def test_fault_in_mid_stream_is_an_error_and_a_failed_answer() -> None:
    events = await responses_stream(engine_of("a", "b", "c", fails_at=2), **OFF)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert "scripted fault" in events[-2]["message"] and events[-1]["response"]["status"] == "failed"


async def test_fault_before_the_first_byte_has_a_real_status() -> None:
    async with asking(engine_of("a", fails_at=0)) as client:
        for stream in (False, True):
            answer = await client.post(PATH, json={"input": "hi", "stream": stream})
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "generation_failed"


# --- what counts and what is refused ---


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "bash"}])
@pytest.mark.parametrize("effort", ["high", "none"])
async def test_a_forced_call_is_held_to_the_schema(choice: Any, effort: str) -> None:
    engine = engine_of("x")
    await responses(engine, tools=TOOLS, tool_choice=choice, reasoning={"effort": effort})
    rule = engine.seen[0][1].structured_outputs
    assert rule is not None and rule.kind == "grammar" and (rule.after_token_id is not None) == (effort != "none")


async def test_allowed_tools_are_the_only_ones_offered() -> None:
    engine = engine_of("x")
    two = [*TOOLS, {**TOOLS[0], "name": "other"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    await responses(engine, tools=two, tool_choice=choice)
    assert '"other"' in prompt_of(engine) and '"bash"' not in prompt_of(engine)
    assert engine.seen[0][1].structured_outputs is not None


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
async def test_text_format_makes_a_rule(kind: str) -> None:
    engine = engine_of("x")
    schema = {"type": "object", "properties": {}}
    await responses(engine, **OFF, text={"format": {"type": kind, "name": "n", "schema": schema, "strict": True}})
    rule = engine.seen[0][1].structured_outputs
    assert rule is not None and rule.kind == kind and "Response Format" in prompt_of(engine)


async def test_hosted_tools_are_left_out_of_the_prompt() -> None:
    engine = engine_of("x")
    await responses(engine, tools=[{"type": "web_search"}])
    await responses(engine)
    assert engine.seen[0][0] == engine.seen[1][0]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": None}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "thought"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"stop": "x"}, "stop"),
        ({"reasoning": {"effort": "zz"}}, "reasoning"),
        ({"reasoning": 5}, "reasoning"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": 5}, "text"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "nope"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "nope"}]}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 3}, "temperature"),
        ({"thinking": 5}, "thinking"),
        ({"include": "x"}, "include"),
    ],
)
async def test_refusals_name_the_field(change: dict[str, Any], param: str) -> None:
    body = await post(engine_of("x"), PATH, {"input": "hi", **change}, status=400)
    assert body["error"]["param"] == param, body
    assert param.split("[")[0].split(".")[0] in body["error"]["message"]


async def test_only_background_answers_can_be_followed() -> None:
    async with asking(engine_of("a")) as client:
        made = (await client.post(PATH, json={"input": "hi"})).json()
        for query, param in (("stream=true", "stream"),):
            answer = await client.get(f"{PATH}/{made['id']}?{query}")
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        made = (await client.post(PATH, json={"input": "hi", "background": True})).json()
        answer = await client.get(f"{PATH}/{made['id']}?stream=true&starting_after=x")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "starting_after"
