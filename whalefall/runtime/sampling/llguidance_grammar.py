# SPDX-License-Identifier: Apache-2.0
"""Grammars by llguidance: JSON schema, regular expressions, choices, Lark and GBNF. The only file that knows the library.

Control tokens are never text to a grammar, whatever it allows: `</think>` inside a JSON string is its letters, not the token. The one
exception is the tool markup token, which tool grammars spell out; it is one token or many, as the vocabulary has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from whalefall.core.structure import StructuredSpec
from whalefall.runtime.sampling.grammar import Bits, Grammar, GrammarFault
from whalefall.text.tokenizer import Tokenizer
from whalefall.text.tool_grammar import MARKER

MAX_BLANKS = 48
"""Between two parts of JSON: room to indent, and an end to a model that writes blanks for ever."""
_JSON_OPTIONS = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_BLANKS}}}"}
_MAX_ITEMS_IN_ROW = 10_000
"""Alternatives at one place of a grammar: enough for an object of two thousand optional properties."""
_MAX_PROBES = 64
"""Schemas compiled, at most, to find the place that is to blame for an error."""


class LLGuidanceCompiler:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """
        Args:
            vocab_size: of the model, which may exceed the tokenizer's: ids without text are never allowed.
        Raises:
            GrammarFault: the library is missing, or there is no end-of-sequence id to end an answer with.
        """
        try:
            import llguidance
        except ImportError as error:
            raise GrammarFault("structured output needs a package that is not installed here: pip install 'llguidance>=1.6,<2'") from error
        if not eos_token_ids:
            raise GrammarFault("structured output needs a model with an end-of-sequence token")
        self._lib = llguidance
        self._vocabulary = llguidance.LLTokenizer(
            cast(Any, _Vocabulary(tokenizer, vocab_size, eos_token_ids[0])), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        self._limits = llguidance.LLParserLimits(max_items_in_row=_MAX_ITEMS_IN_ROW, verbose_errors=False)
        self._executor = llguidance.LLExecutor()
        # The first mask over a large vocabulary takes a second, whatever the grammar: not at the cost of somebody's request.
        self._matcher(self._source(StructuredSpec(kind="json_object", text=""))).compute_bitmask()

    def compile(self, spec: StructuredSpec) -> LLGuidanceGrammar:
        try:
            matcher = self._matcher(self._source(spec))
        except GrammarFault as fault:
            raise self._placed(spec, fault) from None
        grammar = LLGuidanceGrammar(matcher)
        # The first mask is the dear one; and some grammars break at it, so this must happen before the request is let in.
        probe = matcher.deep_copy()
        mask = probe.compute_bitmask()
        if probe.is_error():
            raise GrammarFault(_first_line(probe.get_error()))
        if not any(mask):
            raise GrammarFault("no token of this model's vocabulary can begin such an answer")
        return grammar

    def fill_masks(self, grammars: Sequence[Grammar], bits_MW: Bits) -> None:
        pairs = []
        for row, grammar in enumerate(grammars):
            assert isinstance(grammar, LLGuidanceGrammar)
            pairs.append((grammar.matcher, row))
        if len(pairs) == 1:  # no threads to wake
            pairs[0][0].unsafe_compute_mask_ptr(bits_MW.ctypes.data, bits_MW.shape[1] * 4)
        elif pairs:
            self._executor.unsafe_compute_mask_ptr(pairs, bits_MW.ctypes.data, bits_MW.shape[1] * 4, bits_MW.shape[0])
        for row, grammar in enumerate(grammars):
            if grammar.fault is not None:
                bits_MW[row] = 0

    def _source(self, spec: StructuredSpec) -> str:
        """The spec in the library's words."""
        matcher = self._lib.LLMatcher
        if spec.kind == "json_object":
            return matcher.grammar_from_json_schema('{"type": "object"}', overrides=cast(Any, _JSON_OPTIONS))
        if spec.kind == "json_schema":
            return matcher.grammar_from_json_schema(spec.text, overrides=cast(Any, _JSON_OPTIONS))
        if spec.kind == "choice":
            return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in json.loads(spec.text)))
        if spec.kind == "regex":
            return matcher.grammar_from_regex(_without_anchors(spec.text))
        try:
            return str(self._lib.grammar_from("grammar", spec.text))
        except ValueError as error:
            raise GrammarFault(_first_line(str(error))) from error

    def _matcher(self, source: str) -> Any:
        matcher = self._lib.LLMatcher(self._vocabulary, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarFault(_first_line(matcher.get_error()))
        return matcher

    def _placed(self, spec: StructuredSpec, fault: GrammarFault) -> GrammarFault:
        """The same fault with the place in the schema, if one can be found."""
        for name, schema in (("", spec.text),) if spec.kind == "json_schema" else spec.parts:
            found = self._schema_fault(json.loads(schema))
            if found is not None:
                path, message = self._innermost(json.loads(schema), "$", found, [_MAX_PROBES])
                return GrammarFault(f"{name}: {message}, at {path}" if name else f"{message}, at {path}")
        return fault

    def _innermost(self, schema: Any, path: str, message: str, probes: list[int]) -> tuple[str, str]:
        """Walk down to the smallest part that fails alone for the same reason."""
        for step, part in _parts(schema):
            if probes[0] == 0:
                break
            probes[0] -= 1
            if self._schema_fault(part) == message:
                return self._innermost(part, path + step, message, probes)
        return path, message

    def _schema_fault(self, schema: Any) -> str | None:
        spec = StructuredSpec(kind="json_schema", text=json.dumps(schema))
        is_wrong, messages = self._lib.LLMatcher.validate_grammar_with_warnings(self._source(spec))
        return _first_line(messages[0]) if is_wrong else None


class LLGuidanceGrammar:
    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def clone(self) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(self.matcher.deep_copy())

    def advance(self, token_id: int) -> bool:
        return bool(self.matcher.consume_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self.matcher.rollback(num_tokens)

    @property
    def is_complete(self) -> bool:
        return bool(self.matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        return bool(self.matcher.is_stopped()) and not self.matcher.is_error()

    @property
    def fault(self) -> str | None:
        return _first_line(self.matcher.get_error()) if self.matcher.is_error() else None


class _Vocabulary:
    """Our tokenizer as the library wants to see one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        marker = tokenizer.token_to_id(MARKER)
        self.eos_token_id = eos_token_id
        self.special_token_ids = sorted(i for i in tokenizer.control_ids if i != marker and i < vocab_size)
        self.tokens = [tokenizer.token_bytes(i) or b"" for i in range(min(vocab_size, tokenizer.vocab_size))]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode(plain, add_bos=False, allow_special=False)


def _without_anchors(pattern: str) -> str:
    """The whole answer matches anyway, so that ^ in front and $ at the end say nothing; the library does not know them."""
    pattern = pattern.removeprefix("^")
    num_escapes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and num_escapes % 2 == 0 else pattern


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, with the step of the path."""
    if not isinstance(schema, Mapping):
        return
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(schema.get(key), Mapping):
            yield from ((f".{key}.{name}", part) for name, part in schema[key].items())
    for key in ("items", "additionalProperties", "additionalItems"):
        if isinstance(schema.get(key), Mapping | bool):
            yield f".{key}", schema[key]
    for key in ("anyOf", "oneOf", "allOf", "prefixItems", "items"):
        if isinstance(schema.get(key), list):
            yield from ((f".{key}[{index}]", part) for index, part in enumerate(schema[key]))


def _first_line(message: str) -> str:
    """The library appends its state, or an excerpt of the grammar, on further lines; a regular expression's error is in the last one."""
    if message.startswith("oneOf"):
        return "oneOf is supported only where the schemas plainly exclude each other; use anyOf"
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("error:")), None)
    return f"{lines[0].rstrip(':')}: {said.removeprefix('error: ')}" if said else (lines[0] if lines else "not a grammar")
