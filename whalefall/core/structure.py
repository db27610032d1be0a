# SPDX-License-Identifier: Apache-2.0
"""StructuredSpec: the shape an answer must have, as plain data that may cross a process border. Compiled by runtime/sampling/.

`StructuredOutputsParams(json=...)` builds one from the names vLLM's users know.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from whalefall.core.errors import BadSampling

StructureKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
MAX_SPEC_CHARS = 1_000_000
"""A longer schema or grammar is refused before anything reads it."""
MAX_DEPTH = 200
"""Deepest nesting of a schema."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredSpec:
    """What the text of an answer must match."""

    kind: StructureKind
    text: str
    """A JSON schema; nothing (json_object); a regular expression; a JSON list of strings (choice); a grammar in Lark or GBNF notation."""
    after_token_id: int | None = None
    """The rule begins behind the first token of this id (the end of the reasoning); None: with the first token."""
    param: str = field(default="structured_outputs", compare=False)
    """Name of the field as the client wrote it, for messages."""
    parts: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """(name of the client's field, JSON schema) of schemas inside a grammar that was made from them: which one is to blame, if any."""

    @property
    def key(self) -> tuple[str, str]:
        """Equal keys compile to the same thing."""
        return self.kind, self.text


def StructuredOutputsParams(
    *,
    json: str | Mapping[str, Any] | bool | type | None = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    json_object: bool | None = None,
    param: str = "structured_outputs",
) -> StructuredSpec:
    """The rule for an answer; exactly one of the arguments is given.

    Args:
        json: a schema: a mapping, its JSON text, or a class with `model_json_schema()` (pydantic).
        regex: the whole answer matches it.
        choice: the answer is one of these strings.
        grammar: Lark, or GBNF (rules with `::=`, starting at `root`).
        json_object: True: any JSON object.
    Raises:
        BadSampling: none, several, or one of the wrong type.
    """
    given = {"json": json, "regex": regex, "choice": choice, "grammar": grammar, "json_object": json_object}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        got = ", ".join(named) if named else "none"
        raise BadSampling(f"{param} needs exactly one of {', '.join(given)}; got {got}", param=param)
    kind = named[0]
    place = f"{param}.{kind}" if param == "structured_outputs" else param
    return spec_of(kind, given[kind], place)


def spec_of(kind: str, value: Any, param: str) -> StructuredSpec:
    """One rule from one field of a client; `kind` is an argument's name of StructuredOutputsParams."""
    if kind == "json_object":
        if value is not True:
            raise BadSampling(f"{param} must be true or absent, got {_short(value)}", param=param)
        return StructuredSpec(kind="json_object", text="", param=param)
    if kind == "json":
        return StructuredSpec(kind="json_schema", text=_schema_text(value, param), param=param)
    if kind == "choice":
        is_list = isinstance(value, list | tuple) and bool(value)
        if not is_list or not all(isinstance(item, str) and item for item in value):
            raise BadSampling(f"{param} must be a list of non-empty strings, got {_short(value)}", param=param)
        return StructuredSpec(kind="choice", text=_limited(json_module.dumps(list(value), ensure_ascii=False), param), param=param)
    if not isinstance(value, str) or not value:
        raise BadSampling(f"{param} must be a non-empty string, got {_short(value)}", param=param)
    return StructuredSpec(kind="regex" if kind == "regex" else "grammar", text=_limited(value, param), param=param)


def close_objects(schema: Any) -> Any:
    """What `strict` means where the schema is silent: objects have the properties that are named, all of them, and no others."""
    if isinstance(schema, list):
        return [close_objects(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for key, part in schema.items():
        if key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(part, Mapping):
            closed[key] = {name: close_objects(inner) for name, inner in part.items()}
        elif key in ("items", "anyOf", "oneOf", "allOf", "prefixItems", "additionalProperties"):
            closed[key] = close_objects(part)
        else:
            closed[key] = part  # enum, const, default: data, not schemas
    if isinstance(schema.get("properties"), Mapping):
        closed.setdefault("additionalProperties", False)
        closed.setdefault("required", list(schema["properties"]))
    return closed


def _schema_text(value: Any, param: str) -> str:
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        try:
            value = json_module.loads(_limited(value, param))
        except (ValueError, RecursionError) as error:
            raise BadSampling(f"{param} is not JSON: {error}", param=param) from error
    if value is True:
        value = {}
    if not isinstance(value, Mapping):
        raise BadSampling(f"{param} must be a JSON schema that something fits (an object, or true), got {_short(value)}", param=param)
    _check_depth(value, param)
    try:
        return _limited(json_module.dumps(value, ensure_ascii=False, allow_nan=False), param)
    except (TypeError, ValueError) as error:
        raise BadSampling(f"{param} holds what JSON cannot: {error}", param=param) from error


def _check_depth(value: Any, param: str) -> None:
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise BadSampling(f"{param} is nested deeper than {MAX_DEPTH} levels", param=param)
        nested = [v.values() if isinstance(v, Mapping) else v for v in level if isinstance(v, Mapping | list | tuple)]
        level, depth = [item for items in nested for item in items], depth + 1


def _limited(text: str, param: str) -> str:
    if len(text) > MAX_SPEC_CHARS:
        raise BadSampling(f"{param} has {len(text):,} characters, limit {MAX_SPEC_CHARS:,}", param=param)
    return text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
