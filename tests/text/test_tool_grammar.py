# SPDX-License-Identifier: Apache-2.0
"""Tool grammars: what they allow is what the codec's parser reads back as calls that fit the tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.runtime.sampling.test_grammar import Rule, new_store
from whalefall.core.errors import RequestError
from whalefall.core.structure import StructuredSpec
from whalefall.runtime.sampling.grammar import GrammarStore
from whalefall.runtime.sampling.llguidance_grammar import LLGuidanceCompiler
from whalefall.testing.scripted import piece_tokenizer
from whalefall.text.chat import DeepseekCodec
from whalefall.text.tool_grammar import MARKER as D

WITH_MARKER = piece_tokenizer(["bash", "</think>x"])
"""Has the markup's marker as one token; the other store's vocabulary spells it out."""
STORES = {
    "token": (WITH_MARKER, GrammarStore(lambda: LLGuidanceCompiler(WITH_MARKER, WITH_MARKER.vocab_size, [WITH_MARKER.eos_token_id or 0]))),
    "bytes": (None, new_store()),
}
U = [{"role": "user", "content": "go"}]
OFF = {"thinking": {"type": "disabled"}}


def tool(name: str, properties: dict[str, Any], *, required: list[str] | None = None, strict: bool = False, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties) if required is None else required, **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **({"strict": True} if strict else {})}}


BASH = tool("bash", {"command": {"type": "string"}, "n": {"type": "integer"}}, required=["command"])
MODE = tool("mode", {"kind": {"enum": ["on", "off"]}, "level": {"type": "number", "minimum": 0, "maximum": 9}, "deep": {"type": "object"}})


def call(name: str, *params: tuple[str, str, str], v: str = " ", end: bool = True) -> str:
    inner = "".join(f'<{D}{v}parameter name="{k}" string="{s}">{x}</{D}{v}parameter>\n' for k, s, x in params)
    return f'<{D}{v}invoke name="{name}">\n{inner}' + (f"</{D}{v}invoke>\n" if end else "")


def block(*calls: str, opened: bool = False) -> str:
    return ("" if opened else f"\n\n<{D} calls>\n") + "".join(calls) + f"</{D} calls>"


class Case:
    def __init__(self, store: str, content: StructuredSpec | None = None, **body: Any) -> None:
        tokenizer, self.store = STORES[store]
        self.tokenizer = tokenizer or WITH_MARKER
        self.is_spelled = tokenizer is None
        self.prompt = DeepseekCodec("deepseek_v41", WITH_MARKER).encode({"messages": U, **body})
        self.spec = self.prompt.structure(content, 77)

    def accepts(self, text: str) -> bool:
        assert self.spec is not None
        grammar = self.store.grammar_for(self.spec)
        if self.is_spelled:
            from tests.runtime.sampling.test_grammar import encode

            ids = encode(text)
        else:
            ids = WITH_MARKER.encode(text, add_bos=False, allow_special=True)
        return all(grammar.advance(token_id) for token_id in ids) and grammar.is_complete

    def parsed(self, text: str) -> list[tuple[str, Any]]:
        parser = self.prompt.parser()
        delta = parser.push("</think>" + text if self.prompt.is_thinking else text)
        delta.add(parser.finish("stop"))
        calls: list[list[Any]] = []
        for piece in delta.tool_calls:
            if piece.name is not None:
                calls.append([piece.name, ""])
            calls[-1][1] += piece.arguments
        return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("is_thinking", [True, False])
def test_what_is_allowed_is_what_the_parser_reads(store: str, is_thinking: bool) -> None:
    case = Case(store, tools=[BASH, MODE], tool_choice="required", parallel_tool_calls=True, **({} if is_thinking else OFF))
    opened = not is_thinking  # without thinking the prompt has opened the block
    assert case.prompt.options.starts_in_tool_calls == opened
    assert case.spec is not None and (case.spec.after_token_id == 77) == is_thinking
    good = {
        block(call("bash", ("command", "true", "ls 2>&1 </b> < a\n\té")), opened=opened): [("bash", {"command": "ls 2>&1 </b> < a\n\té"})],
        block(call("bash", ("command", "true", ""), ("n", "false", "-3")), opened=opened): [("bash", {"command": "", "n": -3})],
        block(
            call("mode", ("kind", "true", "off"), ("level", "false", "2.5"), ("deep", "false", '{"a": [1]}')),
            call("bash", ("command", "true", "  a\n b \n")),
            opened=opened,
        ): [("mode", {"kind": "off", "level": 2.5, "deep": {"a": [1]}}), ("bash", {"command": "  a\n b \n"})],
    }
    for text, calls in good.items():
        assert case.accepts(text), text
        assert case.parsed(text) == calls
    bad = [
        block(opened=opened),
        block(call("bash"), opened=opened),
        block(call("bash", ("n", "false", "1")), opened=opened),
        block(call("bash", ("command", "false", '"ls"')), opened=opened),
        block(call("bash", ("command", "true", "a"), ("n", "false", "1.5")), opened=opened),
        block(call("bash", ("command", "true", "a"), ("n", "true", "1")), opened=opened),
        block(call("bash", ("command", "true", "a"), ("command", "true", "a")), opened=opened),
        block(call("bash", ("command", "true", f"a</{D} b")), opened=opened),
        block(call("mode", ("kind", "true", "maybe"), ("level", "false", "1"), ("deep", "false", "{}")), opened=opened),
        block(call("mode", ("kind", "true", "on"), ("level", "false", "99"), ("deep", "false", "{}")), opened=opened),
        block(call("sh", ("command", "true", "a")), opened=opened),
        block(call("bash", ("command", "true", "a"), end=False), opened=opened),
        "hello",
        "",
    ]
    assert [text for text in bad if case.accepts(text)] == []


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "mode"}}])
def test_a_forced_choice_means_one_call(choice: Any) -> None:
    one = call("mode", ("kind", "true", "on"), ("level", "false", "1"), ("deep", "false", "{}"))
    case = Case("token", tools=[BASH, MODE], tool_choice=choice)
    assert case.prompt.is_thinking and case.prompt.text.endswith("<think>")
    assert case.accepts(block(one)) and not case.accepts(block(one, one))
    assert case.accepts(block(call("bash", ("command", "true", "a")))) == (choice == "required")


def test_the_prompt_of_a_forced_choice_while_thinking_is_that_of_auto() -> None:
    body = {"tools": [BASH], "tools_note": None}
    assert Case("token", tool_choice="required", **body).prompt.text == Case("token", **body).prompt.text


def test_a_bad_choice_is_refused_while_thinking_as_ever() -> None:
    for choice in ("zz", {"type": "function", "function": {"name": "nope"}}):
        with pytest.raises(RequestError) as caught:
            Case("token", tools=[BASH], tool_choice=choice)
        assert caught.value.param == "tool_choice"
    with pytest.raises(RequestError):
        Case("token", tool_choice="required")  # of no tools


def test_auto_without_strict_tools_and_none_leave_the_answer_free() -> None:
    assert Case("token", tools=[BASH]).spec is None
    assert (
        Case("token", tools=[tool("s", {"a": {"type": "integer"}}, strict=True, additionalProperties=False)], tool_choice="none").spec
        is None
    )


@pytest.mark.parametrize("store", STORES)
def test_strict_tools_hold_calls_and_leave_prose_free(store: str) -> None:
    case = Case(store, tools=[tool("s", {"a": {"type": "integer"}}, strict=True, additionalProperties=False)])
    good = call("s", ("a", "false", "1"))
    assert all(case.accepts(text) for text in ("", "hello 2 < 3 <", "</b> <｜DS", f"ok\n\n<{D} calls>\n{good}{good}</{D} calls>"))
    bad = [f"ok <{D}", f"<{D} invoke", block(call("s")), block(call("s", ("a", "false", "x"))), block(good) + "tail"]
    assert [text for text in bad if case.accepts(text)] == []


def test_a_schema_for_the_content_goes_together_with_tools() -> None:
    case = Case("token", Rule(json={"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}), tools=[BASH])
    assert case.accepts('{"x":1}') and case.accepts(block(call("bash", ("command", "true", "a"))))
    assert not case.accepts("hello") and not case.accepts('{"x":"1"}')


def test_strict_refuses_by_name_what_cannot_be_enforced_and_others_let_it_pass() -> None:
    odd = {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}
    case = Case("token", tools=[tool("s", odd, strict=True, additionalProperties=False)])
    assert case.spec is not None
    with pytest.raises(RequestError, match="Unimplemented keys") as caught:
        case.store.check(case.spec)
    assert caught.value.param == "tools"
    assert caught.value.message == 'tools: tools[0].function.parameters: Unimplemented keys: ["uniqueItems"], at $.properties.a'
    lenient = Case("token", tools=[tool("s", odd)], tool_choice="required")
    assert lenient.accepts(block(call("s", ("a", "false", "[1, 1]")))) and not lenient.accepts(block(call("s", ("a", "false", '["x"]'))))


def test_references_limits_and_free_parameters() -> None:
    defs = {"$defs": {"Size": {"enum": ["s", "m"]}, "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}}}
    properties = {
        "size": {"$ref": "#/$defs/Size"},
        "node": {"$ref": "#/$defs/Node"},
        "code": {"type": "string", "pattern": "^[a-z]{2}$"},
        "maybe": {"type": ["string", "null"]},
        "any": {},
    }
    case = Case("token", tools=[tool("f", properties, **defs)], tool_choice="required")
    values = [
        ("size", "true", "m"),
        ("node", "false", '{"next": {"next": {}}}'),
        ("code", "false", '"ab"'),
        ("maybe", "true", "x"),
        ("any", "false", "[1]"),
    ]
    assert case.accepts(block(call("f", *values)))
    assert case.parsed(block(call("f", *values))) == [
        ("f", {"size": "m", "node": {"next": {"next": {}}}, "code": "ab", "maybe": "x", "any": [1]})
    ]
    for place, wrong in ((0, ("size", "true", "xl")), (1, ("node", "false", '{"next": 1}')), (2, ("code", "false", '"abc"'))):
        assert not case.accepts(block(call("f", *values[:place], wrong, *values[place + 1 :])))
    free = Case("token", tools=[{"type": "function", "function": {"name": "g"}}], tool_choice="required")
    assert free.accepts(block(call("g"))) and free.accepts(block(call("g", ("x", "true", "y"), ("z", "false", "{}"))))


def test_the_older_format_has_its_own_tags() -> None:
    prompt = DeepseekCodec("deepseek_v4", WITH_MARKER).encode({"messages": U, "tools": [BASH], "tool_choice": "required"})
    spec = prompt.structure(None, 77)
    assert spec is not None
    grammar = STORES["token"][1].grammar_for(spec)
    text = f"\n\n<{D}tool_calls>\n" + call("bash", ("command", "true", "a"), v="") + f"</{D}tool_calls>"
    ids = WITH_MARKER.encode(text, add_bos=False, allow_special=True)
    assert all(grammar.advance(i) for i in ids) and grammar.is_finished
    parser = prompt.parser()
    delta = parser.push("</think>" + text)
    assert [piece.name for piece in delta.tool_calls if piece.name] == ["bash"]
