# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of publicly reported faults: the markup, the tool, and one text read in every way it may be cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from whalefall.testing.scripted import piece_tokenizer
from whalefall.text.chat import DeepseekCodec
from whalefall.text.parser import Delta

D = "｜DSML｜"
TOKENIZER = piece_tokenizer([])
CODEC = DeepseekCodec("deepseek_v41", TOKENIZER)
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}, "required": ["command"]}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]
GO = [{"role": "user", "content": "go"}]


def parameter(value: str, name: str = "command", string: str = "true") -> str:
    return f'<{D} parameter name="{name}" string="{string}">{value}</{D} parameter>\n'


def invoke(*parameters: str, name: str = "bash") -> str:
    return f'<{D} invoke name="{name}">\n{"".join(parameters)}</{D} invoke>\n'


def block(*invokes: str) -> str:
    return f"\n\n<{D} calls>\n{''.join(invokes)}</{D} calls>"


def call(value: str) -> str:
    return block(invoke(parameter(value)))


def cuts(text: str) -> Iterator[list[str]]:
    """One piece, single letters, words, every two-way split, five seeded groupings."""
    yield [text]
    yield list(text)
    yield [piece + " " for piece in text.split(" ")[:-1]] + [text.split(" ")[-1]]
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
    for seed in range(5):
        draw = random.Random(seed)
        marks = sorted(draw.sample(range(1, len(text)), k=min(9, len(text) - 1))) if len(text) > 1 else []
        yield [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)])]


class Answer:
    """One reading of an answer."""

    def __init__(self, pieces: list[str], reason: Any = "stop", **body: Any) -> None:
        parser = CODEC.encode({"messages": GO, **body}).parser()
        self.deltas: list[Delta] = [parser.push(piece) for piece in pieces]
        self.deltas.append(parser.finish(reason))
        whole = Delta()
        for delta in self.deltas:
            whole.add(delta)
        self.content, self.reasoning, self.finish = whole.content, whole.reasoning, parser.finish_reason
        self.ids = [piece.id for piece in whole.tool_calls]
        self.calls = [(piece.index, piece.name, piece.arguments) for piece in whole.tool_calls]

    def key(self) -> Any:
        return self.content, self.reasoning, self.finish, [(i, name, json.loads(text)) for i, name, text in self.calls]

    def raw(self) -> str:
        """Everything that any delta said."""
        said = [delta.content + delta.reasoning + "".join(c.arguments for c in delta.tool_calls) for delta in self.deltas]
        return "\x00".join(said)


def read_every_way(text: str, reason: Any = "stop", **body: Any) -> Answer:
    """Read a text in all cuts, which must agree; no delta may hold markup. Gives the reading of the whole."""
    first = Answer([text], reason, **body)
    for pieces in cuts(text):
        answer = Answer(pieces, reason, **body)
        assert answer.key() == first.key(), pieces
        assert len(set(answer.ids)) == len(answer.ids) and all(answer.ids)
    return first


THINK = {"tools": TOOLS}
NO_THINK = {"tools": TOOLS, "thinking": {"type": "disabled"}}
