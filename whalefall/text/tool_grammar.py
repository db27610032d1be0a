# SPDX-License-Identifier: Apache-2.0
"""Tool calls as a grammar: from the tools of a request to the Lark rules that their calls in DeepSeek's markup must obey.

    \\n\\n<｜DSML｜ calls>\\n <｜DSML｜ invoke name="f">\\n <｜DSML｜ parameter name="a" string="true">text</｜DSML｜ parameter>\\n ...

Parameters come in the order of the schema, each at most once, required ones always. Text stands as it is (string="true"), anything else as
JSON. Pure text work: the rules are compiled elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from whalefall.core.errors import RequestError
from whalefall.core.structure import StructuredSpec, close_objects

MARKER = "｜DSML｜"
CallFormat = Literal["deepseek_v4", "deepseek_v41"]
_TAGS = {"deepseek_v4": (f"{MARKER}", "tool_calls"), "deepseek_v41": (f"{MARKER} ", "calls")}
"""What a tag begins with, and the name of the block."""
_UNSPEAKABLE = re.compile(r'["<>\x00-\x1f]')
"""What a name between double quotes in a tag cannot carry."""
_NOTES = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description", "$schema"))
_NOTES |= frozenset(("default", "examples", "example", "$id", "$comment", "strict", "nullable", "deprecated"))
"""Keys at the root of a tool's parameters that are understood here, or mean nothing to a check."""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]
    is_strict: bool
    param: str
    """Where its schema stands in the client's request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolRule:
    """Which calls may, or must, come."""

    tools: tuple[Tool, ...]
    must_call: bool
    """An answer without a call is not allowed."""
    is_opened: bool = False
    """The prompt ends inside the block of calls."""
    one_call: bool = False


def read_tools(raw: Any) -> tuple[Tool, ...]:
    """The function tools of a request body that a codec has accepted."""
    found = []
    for index, item in enumerate(raw or ()):
        function = item.get("function") if isinstance(item, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            given = function.get("parameters")
            parameters: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
            place = f"tools[{index}].function"
            check_name(function["name"], f"{place}.name")
            is_strict = function.get("strict") is True
            parameters = close_objects(parameters) if is_strict else parameters
            found.append(Tool(function["name"], parameters, is_strict, f"{place}.parameters"))
    return tuple(found)


def tool_spec(rule: ToolRule, call_format: CallFormat, content: StructuredSpec | None = None) -> StructuredSpec:
    """The grammar of an answer.

    Args:
        content: the shape of an answer without calls; None: any text.
    Raises:
        RequestError: a strict tool asks for what the markup cannot express.
    """
    lines = list(_Writer(rule, call_format, content).lines())
    parts = [(tool.param, json.dumps(tool.parameters, ensure_ascii=False)) for tool in rule.tools if tool.is_strict]
    if content is not None and content.kind == "json_schema":
        parts.append((content.param, content.text))
    return StructuredSpec(kind="grammar", text="\n".join(["%llguidance {}", *lines, ""]), param="tools", parts=tuple(parts))


class _Writer:
    def __init__(self, rule: ToolRule, call_format: CallFormat, content: StructuredSpec | None) -> None:
        self._rule = rule
        self._tag, self._block = _TAGS[call_format]
        self._content = content

    def lines(self) -> Iterator[str]:
        tag, rule = self._tag, self._rule
        calls = f"invoke {_text(f'</{tag}{self._block}>')}" if rule.one_call else f"invoke+ {_text(f'</{tag}{self._block}>')}"
        opening = f"<{tag}{self._block}>\n"
        if rule.is_opened:
            yield f"start: {calls}"
        elif rule.must_call:
            yield f"start: {_text(chr(10) * 2 + opening)} {calls}"
        elif self._content is not None:
            yield f"start: content | {_text(chr(10) * 2 + opening)} {calls}"
            yield f"content: {_content_rule(self._content)}"
        else:
            # In free text whatever begins like a tag must become a block of calls, so that no markup is ever half right.
            yield f"start: PROSE | before {_text((tag + self._block).removeprefix(MARKER) + '>' + chr(10))} {calls}"
            yield f"PROSE: /(?s:.*)/ & ~/(?s:.*)<{MARKER}(?s:.*)/"
            yield f"before[lazy]: /(?s:.*)<{MARKER}/"
        yield "invoke: " + " | ".join(f"invoke_{t}" for t in range(len(rule.tools)))
        for t, tool in enumerate(rule.tools):
            yield from self._tool_lines(t, tool)
        yield f"raw[lazy]: /(?s:.*)<\\/{MARKER}/"

    def _tool_lines(self, t: int, tool: Tool) -> Iterator[str]:
        tag = self._tag
        properties = _properties(tool)
        required = set(_required(tool))
        uses = [f"param_{t}_{p}" if name in required else f"param_{t}_{p}?" for p, name in enumerate(properties)]
        if _takes_others(tool):
            uses.append(f"other_{t}*")
        opening, closing = _text(f'<{tag}invoke name="{tool.name}">\n'), _text(f"</{tag}invoke>\n")
        yield f"invoke_{t}: {' '.join([opening, *uses, closing])}"
        for p, (name, schema) in enumerate(properties.items()):
            yield from self._param_lines(f"param_{t}_{p}", f'<{tag}parameter name="{name}" string="', _values(tool, name, schema))
        if _takes_others(tool):
            taken = "".join(f" & ~/{re.escape(name).replace('/', chr(92) + '/')}/" for name in properties)
            yield f'OTHER_{t}: /[^"<>\\x00-\\x1f]{{1,64}}/{taken}'
            anything = _options(tool, tool.parameters.get("additionalProperties"))
            yield f"other_{t}: {_text(f'<{tag}parameter name=' + chr(34))} OTHER_{t} other_{t}_value"
            quote = '" string="'
            yield from self._param_lines(f"other_{t}_value", quote, (_Raw(), _Json(anything)))

    def _param_lines(self, rule: str, head: str, values: Sequence[_Raw | _Json]) -> Iterator[str]:
        end = f"{self._tag}parameter>\n"
        ways, extra = [], []
        for v, value in enumerate(values):
            if isinstance(value, _Json):
                ways.append(f"{_text(head + 'false' + chr(34) + '>')} {rule}_json_{v} {_text('</' + end)}")
                extra.append(f"{rule}_json_{v}: %json {json.dumps(value.schema, ensure_ascii=False)}")
            elif value.choices is not None:
                ways += [_text(f'{head}true">{choice}</{end}') for choice in value.choices]
            else:
                ways.append(f"{_text(head + 'true' + chr(34) + '>')} raw {_text(end.removeprefix(MARKER))}")
        yield f"{rule}: " + " | ".join(ways)
        yield from extra


@dataclass(frozen=True, slots=True)
class _Raw:
    """A string as it stands; of `choices`, or any."""

    choices: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Json:
    schema: Any


def _values(tool: Tool, name: str, schema: Any) -> tuple[_Raw | _Json, ...]:
    """How a parameter's value may be written."""
    plain = _resolved(tool, schema)
    if not isinstance(plain, Mapping):
        if schema is False and tool.is_strict:
            raise _refusal(tool, f"parameter {name!r} can have no value (its schema is false)")
        return _Raw(), _Json(_options(tool, True))
    listed = plain.get("enum", [plain["const"]] if "const" in plain else None)
    if isinstance(listed, list) and listed and all(isinstance(item, str) and f"</{MARKER}" not in item for item in listed):
        return (_Raw(tuple(listed)),)
    kind = plain.get("type")
    has_limits = not {"pattern", "format", "minLength", "maxLength"}.isdisjoint(plain)
    if kind == "string" and listed is None and not has_limits and {"anyOf", "oneOf", "allOf", "not"}.isdisjoint(plain):
        return (_Raw(),)
    # A string with limits is written as JSON, which the schema can check and the parser reads just as well.
    as_json = _Json(_options(tool, schema))
    kinds = kind if isinstance(kind, list) else [branch.get("type") for branch in plain.get("anyOf", ()) if isinstance(branch, Mapping)]
    is_free = kind is None and {"anyOf", "oneOf", "allOf", "not", "enum", "const", "$ref"}.isdisjoint(plain)
    if is_free or ("string" in kinds and isinstance(kind, list) and not has_limits and listed is None):
        return _Raw(), as_json
    return (as_json,)


def _options(tool: Tool, schema: Any) -> Any:
    """The schema of one value, standing alone: with the tool's definitions, and for a tool that is not strict, without the unsupported."""
    whole = dict(schema) if isinstance(schema, Mapping) else {}
    for key in ("$defs", "definitions"):
        if key in tool.parameters and "$ref" in json.dumps(schema):
            whole.setdefault(key, tool.parameters[key])
    guide = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,48}"}
    return {**whole, "x-guidance": guide if tool.is_strict else {**guide, "lenient": True}}


def _resolved(tool: Tool, schema: Any) -> Any:
    """Behind one reference to the tool's own definitions."""
    target = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(target, str) or not target.startswith("#/"):
        return schema
    found: Any = tool.parameters
    for step in target[2:].split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return schema if found is None else found


def _properties(tool: Tool) -> dict[str, Any]:
    unknown = sorted(set(tool.parameters) - _NOTES)
    if tool.is_strict and unknown:
        raise _refusal(tool, f"{', '.join(unknown)} at the root of a strict tool's parameters cannot be enforced")
    if tool.parameters.get("type", "object") != "object":
        raise _refusal(tool, f"the root must be of type object, got {tool.parameters['type']!r}")
    properties = tool.parameters.get("properties") or {}
    if not isinstance(properties, Mapping):
        raise _refusal(tool, f"properties must be an object, got {properties!r}")
    for name in properties:
        check_name(name, f"{tool.param}.properties")
    return dict(properties)


def _required(tool: Tool) -> list[str]:
    required = tool.parameters.get("required") or []
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refusal(tool, f"required must be a list of names, got {required!r}")
    missing = [name for name in required if name not in (tool.parameters.get("properties") or {})]
    if missing and tool.is_strict:
        raise _refusal(tool, f"required names {missing[0]!r}, which is not among the properties")
    return required


def _takes_others(tool: Tool) -> bool:
    """Parameters that the schema does not name: where it says so, or says nothing at all."""
    extra = tool.parameters.get("additionalProperties")
    return not tool.is_strict and (bool(extra) or isinstance(extra, Mapping) or not tool.parameters.get("properties"))


def _content_rule(content: StructuredSpec) -> str:
    if content.kind == "json_object":
        return '%json {"type": "object"}'
    if content.kind == "json_schema":
        return f"%json {content.text}"
    if content.kind == "choice":
        return " | ".join(_text(choice) for choice in json.loads(content.text))
    raise RequestError(f"{content.param}: a {content.kind} cannot go together with tools; use tool_choice none", param=content.param)


def _text(literal: str) -> str:
    return json.dumps(literal, ensure_ascii=False)


def check_name(name: str, place: str) -> None:
    """Raises RequestError where a name cannot stand in a tag."""
    if not name or len(name) > 256 or _UNSPEAKABLE.search(name):
        raise RequestError(f"{place}: {name!r} cannot be written in a tool call: no quotes, < or >, no control characters", param=place)


def _refusal(tool: Tool, message: str) -> RequestError:
    return RequestError(f"{tool.param}: {message}", param=tool.param)
