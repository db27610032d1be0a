# SPDX-License-Identifier: Apache-2.0
"""Tool calls that other engines are publicly reported to have read wrongly: each gives its right value, however the text was cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.text.reports import (
    CODEC,
    GO,
    NO_THINK,
    PARAMETERS,
    THINK,
    TOOLS,
    Answer,
    D,
    block,
    call,
    cuts,
    invoke,
    parameter,
    read_every_way,
)
from whalefall.testing.tokenizer import byte_tokenizer
from whalefall.text.chat import DeepseekCodec


def arguments(answer: Answer) -> list[Any]:
    return [json.loads(text) for _, _, text in answer.calls]


def test_a1_no_delta_holds_a_piece_of_the_closing_tag() -> None:
    text = "</think>" + call("Paris")
    for pieces in cuts(text):
        answer = Answer(pieces, **THINK)
        assert arguments(answer) == [{"command": "Paris"}]
        assert D not in answer.raw() and answer.finish == "tool_calls"


@pytest.mark.parametrize("value", ["ls 2>&1", "a<", "<", "a</", "x >", "<｜", "", "</｜DSML", "&lt;", "a\\", '"', "</"])
def test_a2_values_that_end_like_markup(value: str) -> None:
    answer = read_every_way("r</think>ok" + call(value), **THINK)
    assert (answer.reasoning, answer.content, answer.finish) == ("r", "ok", "tool_calls")
    assert arguments(answer) == [{"command": value}]


@pytest.mark.parametrize(
    "text",
    [
        "</think>ok\n\n" + invoke(parameter("a")),
        "</think>ok" + call("a").removesuffix(f"</{D} calls>"),
        "</think>ok" + call("a") + "tail",
    ],
)
def test_a4_a_broken_wrapper_still_gives_the_call(text: str) -> None:
    answer = read_every_way(text, **THINK)
    assert arguments(answer) == [{"command": "a"}]
    assert (answer.content, answer.finish) == ("ok", "tool_calls") and D not in answer.raw()


def test_a4_a_damaged_tag_gives_neither_call_nor_markup() -> None:
    damaged = block(invoke(parameter("a")).replace("invoke name=", "invoke nme="))
    answer = read_every_way("</think>ok" + damaged, **THINK)
    assert (answer.content, answer.calls, answer.finish) == ("ok", [], "stop") and D not in answer.raw()


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_a5_choice_none_leaves_the_tools_out_of_the_prompt(thinking: str) -> None:
    body = {"messages": GO, "thinking": {"type": thinking}}
    with_none, without = CODEC.encode({**body, "tools": TOOLS, "tool_choice": "none"}), CODEC.encode(body)
    assert with_none.text == without.text and with_none.token_ids == without.token_ids


def test_a5_the_same_in_the_other_protocols() -> None:
    flat = [{"type": "function", "name": "bash", "parameters": PARAMETERS}]
    given = CODEC.encode_responses({"input": "go", "tools": flat, "tool_choice": "none"})
    assert given.token_ids == CODEC.encode_responses({"input": "go"}).token_ids
    blocks = [{"name": "bash", "input_schema": PARAMETERS}]
    given = CODEC.encode_messages({"messages": GO, "tools": blocks, "tool_choice": {"type": "none"}})
    assert given.token_ids == CODEC.encode_messages({"messages": GO}).token_ids


@pytest.mark.parametrize("value", ["  a\n b \n", "\ta\t", "\n", " ", "\r\n x"])
def test_a6_blanks_at_the_ends_of_a_value_stay(value: str) -> None:
    assert arguments(read_every_way("</think>" + call(value), **THINK)) == [{"command": value}]


@pytest.mark.parametrize("text", ["2 <", "a <｜DS", "x <D", "if a < b", "<", "1 <｜"])
def test_a7_text_that_only_begins_like_a_marker_arrives(text: str) -> None:
    for reason, ends in (("stop", "stop"), ("length", "length")):
        answer = read_every_way(text, reason, **NO_THINK)
        assert (answer.content, answer.finish, answer.calls) == (text, ends, [])


def test_a7_a_field_called_arguments_is_not_unwrapped() -> None:
    schema = {"type": "object", "properties": {"arguments": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    answer = read_every_way("</think>" + block(invoke(parameter("q", "arguments"), name="f")), tools=tools)
    assert arguments(answer) == [{"arguments": "q"}]


NAMED = {"type": "function", "function": {"name": "bash"}}


def test_a9_a_named_tool_opens_the_block_and_its_call_is_read() -> None:
    prompt = CODEC.encode({"messages": GO, "tools": TOOLS, "tool_choice": NAMED, "thinking": {"type": "disabled"}})
    assert prompt.text.endswith(f"</think>\n\n<{D} calls>\n")
    rest = invoke(parameter("ls")) + f"</{D} calls>"
    answer = read_every_way(rest, **NO_THINK, tool_choice=NAMED)
    assert (arguments(answer), answer.content, answer.finish) == ([{"command": "ls"}], "", "tool_calls")


def test_a9_a_named_tool_while_thinking_is_called_after_the_reasoning() -> None:
    prompt = CODEC.encode({"messages": GO, "tools": TOOLS, "tool_choice": NAMED})
    assert prompt.is_thinking and prompt.text.endswith("<think>")
    assert prompt.tool_rule is not None and prompt.tool_rule.must_call and prompt.tool_rule.one_call
    answer = read_every_way("hm</think>" + call("ls"), **THINK, tool_choice=NAMED)
    assert (answer.reasoning, arguments(answer)) == ("hm", [{"command": "ls"}])


@pytest.mark.parametrize("spelling", ["spaced", "tight"])
def test_a10_both_spellings_of_the_tags_are_read(spelling: str) -> None:
    text = "</think>" + call("ls")
    answer = read_every_way(text if spelling == "spaced" else text.replace(D + " ", D), **THINK)
    assert arguments(answer) == [{"command": "ls"}] and answer.finish == "tool_calls"


def test_a11_markers_inside_a_legal_argument_stay_in_it() -> None:
    value = "echo </think> <tool_call> <｜User｜> </tool_result>"
    answer = read_every_way("</think>" + call(value), **THINK)
    assert arguments(answer) == [{"command": value}]
    assert (answer.content, answer.reasoning, answer.finish) == ("", "", "tool_calls")


@pytest.mark.parametrize("values", [("a", "b"), ("a", "b", "c", "a")])
def test_a12_no_call_is_lost_however_many_tokens_come_at_once(values: tuple[str, ...]) -> None:
    text = "</think>" + block(*(invoke(parameter(value)) for value in values))
    answer = read_every_way(text, **THINK)
    assert [(index, json.loads(said)) for index, _, said in answer.calls] == [(i, {"command": v}) for i, v in enumerate(values)]
    six = Answer([text[i : i + 6] for i in range(0, len(text), 6)], **THINK)
    assert six.key() == answer.key() and len(set(six.ids)) == len(values)


@pytest.mark.parametrize("value", ["5", "null", "[1, null, true]", '{"x":1}', "-1.5e3", "false", '"s"'])
def test_a13_typed_values_keep_their_type(value: str) -> None:
    answer = read_every_way("</think>" + block(invoke(parameter("x"), parameter(value, "n", "false"))), **THINK)
    assert arguments(answer) == [{"command": "x", "n": json.loads(value)}]


@pytest.mark.parametrize("value", ["5", "null", "true", "[1]", 'say "hi"\\n\t😀', "{}", "\u2028"])
def test_a13_strings_stay_strings(value: str) -> None:
    assert arguments(read_every_way("</think>" + call(value), **THINK)) == [{"command": value}]


@pytest.mark.parametrize("name", ["deepseek-v4.1", "DeepSeek-V4.1-Flash", "/data/DeepSeek-V4.1-Flash", "ds"])
def test_a10_the_served_name_plays_no_part(name: str) -> None:
    prompt = DeepseekCodec("deepseek_v41", byte_tokenizer({})).encode({"messages": GO, "tools": TOOLS, "model": name})
    delta = prompt.parser().push("</think>" + call("ls"))
    assert [c.arguments for c in delta.tool_calls] == ['{"command": "ls"}']
