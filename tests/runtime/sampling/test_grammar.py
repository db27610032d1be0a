# SPDX-License-Identifier: Apache-2.0
"""Compiling and masking: what each kind of rule allows, what is refused and how it is named, and who waits for whom."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from whalefall.core.errors import BadSampling, RequestError
from whalefall.core.structure import StructuredOutputsParams as Rule
from whalefall.core.structure import StructuredSpec
from whalefall.runtime.sampling.grammar import Grammar, GrammarStore
from whalefall.runtime.sampling.llguidance_grammar import LLGuidanceCompiler
from whalefall.testing.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS = (1,)
VOCAB = TOKENIZER.vocab_size + 37
"""More ids than the tokenizer has texts, and no multiple of 32."""


def new_store(**options: int) -> GrammarStore:
    return GrammarStore(lambda: LLGuidanceCompiler(TOKENIZER, VOCAB, EOS), **options)


STORE = new_store()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_bos=False, allow_special=False)


def allowed(grammar: Grammar) -> set[int]:
    bits = np.zeros((1, -(-VOCAB // 32)), np.int32)
    STORE.fill_masks([grammar], bits)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def accepts(spec: StructuredSpec, text: str) -> bool:
    """Token by token, every token among the allowed ones, and the end allowed behind the last."""
    grammar = STORE.grammar_for(spec)
    for token_id in encode(text):
        if token_id not in allowed(grammar):
            return False
        assert grammar.advance(token_id)
    assert grammar.is_complete == (EOS[0] in allowed(grammar))
    return grammar.is_complete


PERSON = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (
            Rule(json=PERSON),
            ['{"n":1}', '{ "n" : -7 }', '{\n  "n": 0\n}'],
            ["{}", '{"n":1.5}', '{"n":"1"}', '{"m":1}', '{"n":1,"m":2}', "1"],
        ),
        (Rule(json=json.dumps(PERSON)), ['{"n":1}'], ['{"n":']),
        (Rule(json={}), ["1", "null", '"x"', "[1, {}]"], ["", "x", "[", "{'a': 1}"]),
        (Rule(json=True), ["1"], ["x"]),
        (Rule(json_object=True), ["{}", '{"a": [1, null]}'], ["[]", "1", ""]),
        (Rule(regex=r"\d{3}-[a-c]+"), ["123-abc"], ["12-a", "123-", "123-d", "x123-a"]),
        (Rule(regex=r"^\d+$"), ["7"], ["", "7 ", "$"]),
        (Rule(regex=r"a\$"), ["a$"], ["a"]),
        (Rule(choice=["red", 'say "hi"', "é\n"]), ["red", 'say "hi"', "é\n"], ["re", "redd", "blue"]),
        (Rule(grammar='start: "a" ("b" | "c")+'), ["ab", "acbc"], ["a", "abd"]),
        (Rule(grammar='root ::= "yes" | "no" root'), ["yes", "nonoyes"], ["no"]),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredSpec) else None,
)
def test_what_a_rule_allows(spec: StructuredSpec, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(spec, text)] == []
    assert [text for text in bad if accepts(spec, text)] == []


def test_control_tokens_and_ids_without_text_are_never_allowed() -> None:
    grammar = STORE.grammar_for(Rule(regex="(?s:.*)"))
    ids = allowed(grammar)
    assert ids & set(TOKENIZER.control_ids) == {EOS[0]} and max(ids) < TOKENIZER.vocab_size
    # A control token's letters are text like any other.
    assert accepts(Rule(json={"type": "string"}), '"</think>"')


def test_the_end_is_allowed_exactly_when_the_grammar_may_end() -> None:
    grammar = STORE.grammar_for(Rule(choice=["a", "ab"]))
    assert EOS[0] not in allowed(grammar) and not grammar.is_complete
    grammar.advance(encode("a")[0])
    assert allowed(grammar) == {EOS[0], encode("b")[0]} and grammar.is_complete and not grammar.is_finished
    grammar.advance(encode("b")[0])
    assert allowed(grammar) == {EOS[0]} and grammar.is_finished


def test_blanks_between_the_parts_of_json_come_to_an_end() -> None:
    spec = Rule(json_object=True)
    assert accepts(spec, "{" + " " * 48 + "}") and not accepts(spec, "{" + "\n" * 49 + "}")


def test_clone_and_rollback_leave_the_others_alone() -> None:
    grammar = STORE.grammar_for(Rule(regex="ab*c"))
    a, b, c = encode("abc")
    grammar.advance(a)
    other = grammar.clone()
    for _ in range(3):
        grammar.advance(b)
    grammar.advance(c)
    assert grammar.is_finished and allowed(other) == {b, c}
    grammar.rollback(4)
    assert allowed(grammar) == {b, c}
    assert not grammar.advance(a) and grammar.fault is not None and allowed(grammar) == set()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (Rule(json={"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}}), '"not"]*at $.properties.a.items'),
        (Rule(json={"anyOf": [{"type": "integer"}, {"uniqueItems": True}]}), '"uniqueItems"]*at $.anyOf[1]'),
        (Rule(json={"type": "array", "items": 5}), "schema must be an object or boolean"),
        (Rule(json={"$ref": "#/nope"}), "'/nope' does not exist"),
        (Rule(json={"type": "string", "pattern": "("}), "unclosed group"),
        (Rule(json={"type": "string", "format": "colour"}), "Unknown format: colour"),
        (Rule(json={"type": "nothing"}), "Invalid type: nothing"),
        (Rule(regex="("), "unclosed group"),
        (Rule(regex="(?<=a)b"), "look-around"),
        (Rule(grammar="@@"), "@@"),
        (Rule(grammar='start: other "a"'), "other"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_is_refused_by_name_and_place(spec: StructuredSpec, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        STORE.check(spec)
    assert all(part in caught.value.message for part in says.split("*")), caught.value.message
    assert caught.value.message.startswith(spec.param) and caught.value.param == spec.param
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json": 5},
        {"json": "{"},
        {"json": False},
        {"regex": ""},
        {"choice": []},
        {"choice": [""]},
        {"choice": "ab"},
        {"json_object": False},
        {"grammar": 3},
        {"regex": "a" * 2000000},
        {"json": {"const": float("nan")}},
    ],
)
def test_malformed_rules_are_refused_before_any_compiler_sees_them(given: dict[str, object]) -> None:
    with pytest.raises(BadSampling):
        Rule(**given)  # type: ignore[arg-type]


def test_a_schema_nested_too_deep_is_refused() -> None:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(BadSampling, match="nested deeper"):
        Rule(json=schema)


def test_equal_rules_compile_once_and_old_ones_are_forgotten() -> None:
    store = new_store(max_entries=2)
    specs = [Rule(regex=f"x{{{count}}}") for count in (1, 2, 3)]
    for spec in (specs[0], specs[0], specs[1]):
        store.check(spec)
    assert store.num_compiled == 2
    store.check(specs[0])
    store.check(specs[2])  # specs[1] was used longest ago
    store.check(specs[0])
    assert store.num_compiled == 3
    store.check(specs[1])
    assert store.num_compiled == 4


class SlowCompiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.inner = LLGuidanceCompiler(TOKENIZER, VOCAB, EOS)

    def compile(self, spec: StructuredSpec) -> Grammar:
        if spec.text == "slow":
            assert self.go.wait(60)
        return self.inner.compile(spec)

    def fill_masks(self, grammars: Sequence[Grammar], bits_MW: np.ndarray) -> None:
        self.inner.fill_masks(grammars, bits_MW)


async def test_a_slow_grammar_is_refused_in_time_and_holds_up_nobody() -> None:
    slow = SlowCompiler()
    store = GrammarStore(lambda: slow, time_limit_s=0.05)
    waiting = asyncio.create_task(store.check_async(Rule(regex="slow")))
    await asyncio.sleep(0)
    store.time_limit_s = 60.0
    await store.check_async(Rule(regex="quick"))
    store.time_limit_s = 0.05
    with pytest.raises(RequestError, match=r"took longer than 0\.05 s"):
        await store.check_async(Rule(regex="slow"))
    slow.go.set()
    await asyncio.gather(waiting, return_exceptions=True)


def test_masks_of_many_rows_are_those_of_each_alone() -> None:
    grammars = []
    for count in range(40):
        grammar = STORE.grammar_for(Rule(json=PERSON))
        for token_id in encode('{ "n": 12345678901234567890 }')[: count % 28]:
            grammar.advance(token_id)
        grammars.append(grammar)
    bits = np.zeros((len(grammars), -(-VOCAB // 32)), np.int32)
    STORE.fill_masks(grammars, bits)
    rows = [set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()) for row in bits]
    assert rows == [allowed(grammar) for grammar in grammars]


def test_a_compiler_that_breaks_refuses_the_rule_and_goes_on() -> None:
    class Broken(SlowCompiler):
        def compile(self, spec: StructuredSpec) -> Grammar:
            if spec.text == "odd":
                raise ZeroDivisionError
            return super().compile(spec)

    store = GrammarStore(Broken)
    with pytest.raises(RequestError, match="ZeroDivisionError"):
        store.check(Rule(regex="odd"))
    store.check(Rule(regex="fine"))


def test_a_missing_library_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="structured output needs a package"):
        new_store().check(Rule(json_object=True))
