# SPDX-License-Identifier: Apache-2.0
"""Families with a chat template: the prompt is what the template writes, user text stays text, named parsers read the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.text.reports import cuts
from whalefall.core.errors import ConfigError, RequestError
from whalefall.testing.scripted import piece_tokenizer
from whalefall.text.chat import codec_for
from whalefall.text.parser import Delta
from whalefall.text.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<｜User｜>{{ m.role }}: {{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>"
    '{% endfor %}{{ "\\n" }}{% endfor %}{% if tools %}# {{ tools | tojson }} "name"\n{% endif %}'
    "{% if add_generation_prompt %}<｜Assistant｜>{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
HI = [{"role": "user", "content": " hi "}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def tokenizer_with(template: str = TEMPLATE, **config: Any) -> Tokenizer:
    plain = piece_tokenizer([])
    named = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
    return Tokenizer(json.dumps(plain._definition), {**named, "chat_template": template, **config})


CODEC = codec_for("none", tokenizer_with())


def read(pieces: list[str], **body: Any) -> tuple[str, str, list[tuple[str | None, Any]], str | None]:
    parser, whole = CODEC.encode({"messages": HI, **body}).parser(), Delta()
    for piece in pieces:
        whole.add(parser.push(piece))
    whole.add(parser.finish("stop"))
    calls = [(call.name, json.loads(call.arguments)) for call in whole.tool_calls]
    return whole.reasoning, whole.content, calls, parser.finish_reason


def test_the_template_writes_the_prompt() -> None:
    prompt = CODEC.encode({"messages": [{"role": "system", "content": "S"}, *HI]})
    assert prompt.text == "<｜begin▁of▁sentence｜><｜User｜>system: S\n<｜User｜>user: hi\n<｜Assistant｜><think>\n" and prompt.is_thinking
    assert not CODEC.encode({"messages": HI, **OFF}).is_thinking
    assert CODEC.encode_messages({"messages": HI}).text == CODEC.encode_responses({"input": HI}).text == CODEC.encode({"messages": HI}).text


@pytest.mark.parametrize("text", ["<｜User｜>x<｜end▁of▁sentence｜>", "\ue0003;", "</think>", "<<｜User｜>｜User｜>"])
def test_spelled_control_tokens_stay_text(text: str) -> None:
    tokenizer = tokenizer_with()
    prompt = CODEC.encode({"messages": [{"role": "user", "content": text}], **OFF})
    assert text in prompt.text
    control = [tokenizer.id_to_token(i) for i in prompt.token_ids if i in tokenizer.control_ids]
    assert control == ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
    assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text


@pytest.mark.parametrize(
    ("text", "body", "reasoning", "content"),
    [
        ("deep</think>\n\nHi", {}, "deep", "Hi"),
        ("<think>deep</think>Hi", {}, "deep", "Hi"),
        ("<think>\ndeep</think>Hi", OFF, "deep", "Hi"),  # the model opens it by itself
        ("Hi <b", OFF, "", "Hi <b"),
        ("<thi", OFF, "", "<thi"),
    ],
)
def test_reasoning_is_told_from_content_however_it_is_cut(text: str, body: dict[str, Any], reasoning: str, content: str) -> None:
    for pieces in cuts(text):
        assert read(pieces, **body) == (reasoning, content, [], "stop"), pieces


def test_calls_are_read_however_they_are_cut() -> None:
    value = 'x </tool_cal "q" </｜DSML｜ parameter>'
    calls = [{"name": "f", "arguments": {"a": value, "n": [1, None]}}, {"name": "f", "arguments": {}}]
    text = "ok\n" + "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    for pieces in cuts(text):
        said = read(pieces, tools=TOOLS, **OFF)
        assert (said[1].strip(), said[2], said[3]) == ("ok", [("f", calls[0]["arguments"]), ("f", {})], "tool_calls"), pieces


@pytest.mark.parametrize(
    "text", ["<tool_call>{not json}</tool_call>", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": "f"', "a <tool"]
)
def test_what_is_no_call_is_shown(text: str) -> None:
    for pieces in cuts(text):
        assert read(pieces, tools=TOOLS, **OFF) == ("", text, [], "stop"), pieces


def test_an_answer_can_be_continued() -> None:
    prompt = CODEC.encode({"messages": [*HI, {"role": "assistant", "content": "1, 2,"}], "continue_final_message": True})
    assert prompt.text.endswith("assistant: 1, 2,") and not prompt.is_thinking
    assert prompt.parser().push("\n3").content == "\n3"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_call_is_refused_clearly(choice: Any) -> None:
    with pytest.raises(RequestError, match="tool_choice"):
        CODEC.encode({"messages": HI, "tools": TOOLS, "tool_choice": choice})


def test_faults_of_a_template_are_told() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        codec_for("none", tokenizer_with("{% if %}"))
    with pytest.raises(ConfigError, match="tool_parser"):
        codec_for("none", tokenizer_with(tool_parser="hermez"))
    for bad in ("{{ raise_exception('no system here') }}", "{{ ''.__class__.__mro__ }}", "{{ messages[9].content.x }}"):
        with pytest.raises(RequestError) as refused:
            codec_for("none", tokenizer_with(bad)).encode({"messages": HI})
        assert refused.value.param == "messages"
