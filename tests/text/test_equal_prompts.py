# SPDX-License-Identifier: Apache-2.0
"""Over random conversations in all three protocols, prompts and ids are those of the reference library, byte for byte."""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalefall.testing.scripted import piece_tokenizer
from whalefall.text.chat import DeepseekCodec

TOKENIZER = piece_tokenizer([])
TARGETS = {"deepseek_v4": recipe.ModelVersion.DeepseekV4Pro, "deepseek_v41": recipe.ModelVersion.DeepseekV41Flash}
_RECIPE_TOKENIZER = recipe.Tokenizer.from_str(json.dumps(TOKENIZER._definition))
ENCODINGS: dict[str, Any] = {
    "deepseek_v4": recipe.DeepseekV4Encoding().with_tokenizer(_RECIPE_TOKENIZER),
    "deepseek_v41": recipe.DeepseekV41Encoding().with_tokenizer(_RECIPE_TOKENIZER),
}
CODECS = {name: DeepseekCodec(name, TOKENIZER) for name in TARGETS}  # type: ignore[arg-type]

text = st.text(st.sampled_from("ab \n<>/｜▁é🐋\"'\\{}"), max_size=12) | st.sampled_from(["</think>", "<｜User｜>", "｜DSML｜", "None"])
filled = text.filter(lambda t: bool(t.strip()))
values = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | text, lambda inner: st.lists(inner, max_size=2), max_leaves=4)
arguments = st.dictionaries(st.sampled_from(["command", "n", "x"]), values, max_size=3)
names = st.sampled_from(["bash", "read_file"])
schemas = st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(names, st.just({"type": "string"}), max_size=2)})
tools = st.lists(st.tuples(names, filled, schemas), max_size=2, unique_by=lambda t: t[0])


@st.composite
def turns(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """("user", text), ("assistant", (reasoning, text, [(id, name, arguments)])), ("results", [(id, text)]): a sound conversation."""
    made: list[tuple[str, Any]] = [("user", draw(filled))]
    for number in range(draw(st.integers(0, 3))):
        wanted = draw(st.lists(st.tuples(names, arguments), max_size=2))
        calls = [(f"c{number}_{i}", name, given) for i, (name, given) in enumerate(wanted)]
        made.append(("assistant", (draw(st.none() | filled), draw(filled), calls)))
        if calls:
            results = [(call_id, draw(filled)) for call_id, _, _ in calls]
            made.append(("results", draw(st.permutations(results))))
        else:
            made.append(("user", draw(filled)))
    return made


def chat_body(conversation: list[tuple[str, Any]], offered: list[Any]) -> dict[str, Any]:
    messages: list[Any] = []
    for kind, said in conversation:
        if kind == "user":
            messages.append({"role": "user", "content": said})
        elif kind == "results":
            messages += [{"role": "tool", "tool_call_id": call_id, "content": result} for call_id, result in said]
        else:
            reasoning, content, calls = said
            turn: dict[str, Any] = {"role": "assistant", "content": content}
            if reasoning is not None:
                turn["reasoning_content"] = reasoning
            if calls:
                turn["tool_calls"] = [
                    {"id": i, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}} for i, n, a in calls
                ]
            messages.append(turn)
    listed = [{"type": "function", "function": {"name": n, "description": d, "parameters": p}} for n, d, p in offered]
    return {"messages": messages, **({"tools": listed} if listed else {})}


def responses_body(conversation: list[tuple[str, Any]], offered: list[Any]) -> dict[str, Any]:
    items: list[Any] = []
    for kind, said in conversation:
        if kind == "user":
            items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": said}]})
        elif kind == "results":
            items += [{"type": "function_call_output", "call_id": call_id, "output": result} for call_id, result in said]
        else:
            reasoning, content, calls = said
            if reasoning is not None:
                items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": reasoning}]})
            items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": content}]})
            items += [{"type": "function_call", "call_id": i, "name": n, "arguments": json.dumps(a)} for i, n, a in calls]
    listed = [{"type": "function", "name": n, "description": d, "parameters": p} for n, d, p in offered]
    return {"input": items, **({"tools": listed} if listed else {})}


def messages_body(conversation: list[tuple[str, Any]], offered: list[Any]) -> dict[str, Any]:
    messages: list[Any] = []
    for kind, said in conversation:
        if kind == "user":
            messages.append({"role": "user", "content": said})
        elif kind == "results":
            messages.append(
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": result} for i, result in said]}
            )
        else:
            reasoning, content, calls = said
            blocks: list[Any] = [] if reasoning is None else [{"type": "thinking", "thinking": reasoning, "signature": "s"}]
            blocks.append({"type": "text", "text": content})
            blocks += [{"type": "tool_use", "id": i, "name": n, "input": a} for i, n, a in calls]
            messages.append({"role": "assistant", "content": blocks})
    listed = [{"name": n, "description": d, "input_schema": p} for n, d, p in offered]
    return {"messages": messages, **({"tools": listed} if listed else {})}


def check(version: str, kind: Any, encode: Any, body: dict[str, Any]) -> None:
    options = recipe.ConversionOptions().with_model_alias("m", TARGETS[version])
    expected = kind({"model": "m", **body}).convert(options).conversation
    prompt = encode(body)
    assert prompt.text == ENCODINGS[version].render_conversation(expected).prompt
    assert prompt.token_ids == ENCODINGS[version].encode(expected)


@pytest.mark.parametrize("version", list(TARGETS))
@settings(max_examples=40)
@given(conversation=turns(), offered=tools, effort=st.sampled_from([None, "none", "low", "high", "max"]), system=st.none() | filled)
def test_chat(version: str, conversation: list[tuple[str, Any]], offered: list[Any], effort: str | None, system: str | None) -> None:
    body = chat_body(conversation, offered)
    if system is not None:
        body["messages"].insert(0, {"role": "system", "content": system})
    check(version, recipe.ChatCompletionRequest, CODECS[version].encode, {**body, **({"reasoning_effort": effort} if effort else {})})


@pytest.mark.parametrize("version", list(TARGETS))
@settings(max_examples=40)
@given(conversation=turns(), offered=tools, effort=st.sampled_from([None, "none", "low", "high", "max"]), system=st.none() | filled)
def test_responses(version: str, conversation: list[tuple[str, Any]], offered: list[Any], effort: str | None, system: str | None) -> None:
    body = responses_body(conversation, offered)
    more = {**({"reasoning": {"effort": effort}} if effort else {}), **({"instructions": system} if system else {})}
    check(version, recipe.ResponsesRequest, CODECS[version].encode_responses, {**body, **more})


@pytest.mark.parametrize("version", list(TARGETS))
@settings(max_examples=40)
@given(conversation=turns(), offered=tools, thinking=st.sampled_from([None, "enabled", "disabled", "adaptive"]), system=st.none() | filled)
def test_messages(version: str, conversation: list[tuple[str, Any]], offered: list[Any], thinking: str | None, system: str | None) -> None:
    body = messages_body(conversation, offered)
    more = {**({"thinking": {"type": thinking}} if thinking else {}), **({"system": system} if system else {})}
    check(version, recipe.MessagesRequest, CODECS[version].encode_messages, {**body, **more})
