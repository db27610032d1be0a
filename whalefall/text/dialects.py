# SPDX-License-Identifier: Apache-2.0
"""Named parsers of other families: their reasoning and tool calls, put into DeepSeek's markup while it streams, which the codec then reads.

    reasoning "think"    <think> ... </think>, opened by the prompt or by the model itself
    tool "hermes"        <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one for each call

A call that is no sound JSON is shown as the text it is: nothing the model said is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from whalefall.core.errors import ConfigError, not_among
from whalefall.text.parser import Dialect
from whalefall.text.tool_grammar import MARKER

REASONING_PARSERS = ("think", "none")
TOOL_PARSERS = ("hermes", "none")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_UNSPEAKABLE = re.compile(r'["<>\x00-\x1f]')


def choose_parsers(template: str, named: Mapping[str, str]) -> tuple[str, str]:
    """(reasoning, tool) parser: by name, or else by what the template itself writes.

    Raises:
        ConfigError: there is no parser of that name.
    """
    reasoning = named.get("reasoning", "think" if "<think>" in template else "none")
    tool = named.get("tool", "hermes" if _OPEN in template and '"name"' in template else "none")
    for kind, name, known in (("reasoning_parser", reasoning, REASONING_PARSERS), ("tool_parser", tool, TOOL_PARSERS)):
        if name not in known:
            raise ConfigError(not_among(kind, name, known))
    return reasoning, tool


class ThinkDialect:
    """Says for itself whether an answer begins with reasoning: with the model's own `<think>`, or in a block that the prompt opened."""

    def __init__(self, *, is_opened: bool) -> None:
        self._is_opened = is_opened
        self._head: str | None = ""
        """What has come so far, until it is clear how the answer begins; then None."""

    def push(self, text: str) -> str:
        if self._head is None:
            return text
        self._head += text
        begun = self._head.lstrip()
        if len(begun) < len("<think>") and "<think>".startswith(begun):
            return ""
        return self._decide(begun)

    def finish(self) -> str:
        return "" if self._head is None else self._decide(self._head.lstrip())

    def _decide(self, begun: str) -> str:
        self._head = None
        if begun.startswith("<think>"):
            return begun.removeprefix("<think>")
        return begun if self._is_opened else "</think>" + begun


class HermesDialect:
    def __init__(self) -> None:
        self._held = ""
        """May be, or is, the beginning of a call."""
        self._has_called = False

    def push(self, text: str) -> str:
        self._held += text
        said = ""
        while True:
            start = self._held.find(_OPEN)
            if start < 0:
                keep = next((n for n in range(min(len(_OPEN) - 1, len(self._held)), 0, -1) if _OPEN.startswith(self._held[-n:])), 0)
                cut = len(self._held) - keep
                said, self._held = said + self._plain(self._held[:cut]), self._held[cut:]
                return said
            end = self._held.find(_CLOSE, start)
            if end < 0:
                said, self._held = said + self._plain(self._held[:start]), self._held[start:]
                return said
            said += self._plain(self._held[:start]) + self._call(self._held[start + len(_OPEN) : end])
            self._held = self._held[end + len(_CLOSE) :]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return self._plain(held) + (f"</{MARKER} calls>" if self._has_called else "")

    def _plain(self, text: str) -> str:
        """Blanks between calls are no answer."""
        return "" if self._has_called or not text else text

    def _call(self, text: str) -> str:
        made = _as_markup(text)
        if made is None:
            return self._plain(_OPEN + text + _CLOSE)
        opening = "" if self._has_called else f"\n\n<{MARKER} calls>\n"
        self._has_called = True
        return opening + made


def _as_markup(text: str) -> str | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    name, given = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(given, dict) or any(_UNSPEAKABLE.search(key) for key in (name, *given)):
        return None
    return f'<{MARKER} invoke name="{name}">\n{"".join(_parameter(k, v) for k, v in given.items())}</{MARKER} invoke>\n'


def _parameter(name: str, value: Any) -> str:
    is_plain = isinstance(value, str) and MARKER not in value
    said = value if is_plain else json.dumps(value).replace("｜", "\\uff5c")
    return f'<{MARKER} parameter name="{name}" string="{"true" if is_plain else "false"}">{said}</{MARKER} parameter>\n'


class Chained:
    """One dialect behind the other."""

    def __init__(self, *dialects: Dialect) -> None:
        self._dialects = dialects

    def push(self, text: str) -> str:
        for dialect in self._dialects:
            text = dialect.push(text)
        return text

    def finish(self) -> str:
        said = ""
        for dialect in self._dialects:
            said = dialect.push(said) + dialect.finish() if said else dialect.finish()
        return said
