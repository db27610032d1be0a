# SPDX-License-Identifier: Apache-2.0
"""What a client says about the shape of an answer, in the four ways clients say it, as one `StructuredSpec`.

response_format (OpenAI), structured_outputs (vLLM), guided_json and its kin (older vLLM). At most one of them counts; what is not supported
is refused by name, so that no answer is ever left unconstrained in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whalefall.core.errors import RequestError
from whalefall.core.structure import StructuredSpec, close_objects, spec_of

STRUCTURE_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
UNSUPPORTED_FIELDS = ("guided_whitespace_pattern", "structural_tag")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_UNSUPPORTED_OPTIONS = ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def read_structure(fields: Mapping[str, Any]) -> StructuredSpec | None:
    """The one rule among these fields of a body; None when there is none.

    Raises:
        RequestError: a field has the wrong shape, or there are several; `param` names it.
    """
    for name in UNSUPPORTED_FIELDS:
        if fields.get(name) is not None:
            raise RequestError(f"{name} is not supported", param=name)
    found = [spec for name in STRUCTURE_FIELDS if (spec := _read(name, fields.get(name))) is not None]
    if len(found) > 1:
        names = ", ".join(spec.param for spec in found)
        raise RequestError(f"one rule for the answer at a time, got {names}", param=found[1].param)
    return found[0] if found else None


def _read(name: str, value: Any) -> StructuredSpec | None:
    if value is None:
        return None
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    return spec_of(name.removeprefix("guided_"), value, name)


def _response_format(value: Any) -> StructuredSpec | None:
    place = "response_format"
    if not isinstance(value, Mapping):
        raise RequestError(f"{place} must be an object, got {_short(value)}", param=place)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return spec_of("json_object", True, place)
    if kind != "json_schema":
        raise RequestError(f"{place}.type must be text, json_object or json_schema, got {_short(kind)}", param=f"{place}.type")
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping):
        raise RequestError(f"{place}.json_schema must be an object with a schema, got {_short(inner)}", param=f"{place}.json_schema")
    return _schema_rule(inner, f"{place}.json_schema")


def read_flat_format(value: Any, place: str) -> tuple[StructuredSpec | None, dict[str, Any] | None]:
    """The format of a Responses or Messages body, whose schema stands in it directly: the rule, and the same as a `response_format`."""
    if value is None:
        return None, None
    if not isinstance(value, Mapping):
        raise RequestError(f"{place} must be an object, got {_short(value)}", param=place)
    kind = value.get("type")
    if kind == "text":
        return None, None
    if kind == "json_object":
        return spec_of("json_object", True, place), {"type": "json_object"}
    if kind != "json_schema":
        raise RequestError(f"{place}.type must be text, json_object or json_schema, got {_short(kind)}", param=f"{place}.type")
    return _schema_rule(value, place), {"type": "json_schema", "json_schema": {"schema": value.get("schema")}}


def one_rule(first: StructuredSpec | None, second: StructuredSpec | None) -> StructuredSpec | None:
    """The one of two that is there. Raises RequestError when both are."""
    if first is not None and second is not None:
        raise RequestError(f"one rule for the answer at a time, got {first.param}, {second.param}", param=second.param)
    return first or second


def _schema_rule(inner: Mapping[str, Any], place: str) -> StructuredSpec:
    schema, strict = inner.get("schema"), inner.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{place}.strict must be true or false, got {_short(strict)}", param=f"{place}.strict")
    spec = spec_of("json", schema, f"{place}.schema")  # checks depth and size first
    return spec_of("json", close_objects(schema), spec.param) if strict and isinstance(schema, Mapping) else spec


def _structured_outputs(value: Any) -> StructuredSpec | None:
    place = "structured_outputs"
    if not isinstance(value, Mapping):
        raise RequestError(f"{place} must be an object, got {_short(value)}", param=place)
    for name in _UNSUPPORTED_OPTIONS:
        if value.get(name) not in (None, False):
            raise RequestError(f"{place}.{name} is not supported", param=f"{place}.{name}")
    named = [name for name in _KINDS if value.get(name) is not None]
    if len(named) != 1:
        got = ", ".join(named) if named else "none of them"
        raise RequestError(f"{place} must have exactly one of {', '.join(_KINDS)}, got {got}", param=place)
    return spec_of(named[0], value[named[0]], f"{place}.{named[0]}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
