# SPDX-License-Identifier: Apache-2.0
"""Agent traces: sessions of many turns whose prompt grows by answers and tool results, in the manner of SemiAnalysis' AgentX. From a seed.

A *user* runs sessions one after the other. A session opens with a system prompt and tool descriptions that all sessions of its kind share,
then a task; each turn asks for an answer, waits as long as a tool would take, and appends the tool's result. When the context would pass
its limit it is compacted: system prompt kept, the rest replaced by a summary, so the prefix breaks as it does in real traces.

What is reported: *logical* tokens (all prompt tokens), *fresh* tokens (those the server did not take from its cache), the hit rate, and the
*ideal* hit rate of a cache that never forgets: whole blocks that an earlier request, finished before this one was sent, had already
computed, as prompt or as answer.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from whalefall.bench.load import Pace, RealPace
from whalefall.bench.metrics import Spread, e2e_s, spread, tpot_s, ttft_s
from whalefall.bench.mixes import WORDS, Lengths, PromptMaker
from whalefall.bench.openai import Ask
from whalefall.bench.records import Record

TOOLS = ("read_file", "search", "run_command", "edit_file")


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentShape:
    """Lengths in units: token ids, or words (about 1.3 tokens) where text is sent."""

    system: int = 4_096
    """System prompt and tool descriptions, shared by all sessions of a kind."""
    kinds: int = 2
    """Different agents, each with its own system prompt."""
    task: Lengths = field(default_factory=lambda: Lengths(300, 0.8, 16, 4_096))
    turns: Lengths = field(default_factory=lambda: Lengths(12, 0.6, 2, 60))
    answer: Lengths = field(default_factory=lambda: Lengths(120, 0.8, 16, 2_048))
    tool_result: Lengths = field(default_factory=lambda: Lengths(500, 1.1, 16, 8_192))
    tool_time_s: float = 1.0
    """Mean of the exponential pause between an answer and the next turn."""
    max_context: int = 65_536
    summary: int = 600
    """What compaction leaves of the conversation."""


@dataclass(frozen=True, slots=True)
class Turn:
    append: tuple[Any, ...]
    """Units added to the context before asking: the task, or a tool's result."""
    max_tokens: int
    pause_s: float
    """Tool time before this turn; 0 for the first."""


@dataclass(frozen=True, slots=True)
class Session:
    name: str
    kind: int
    system: tuple[Any, ...]
    turns: tuple[Turn, ...]
    summary: tuple[Any, ...]


def make_sessions(count: int, shape: AgentShape, maker: PromptMaker, rng: random.Random) -> list[Session]:
    systems = [tuple(maker.units(shape.system)) for _ in range(shape.kinds)]
    sessions = []
    for number in range(count):
        kind = rng.randrange(shape.kinds)
        first = Turn(tuple(maker.units(shape.task.draw(rng))), shape.answer.draw(rng), 0.0)
        rest = [
            Turn(
                tuple(maker.units(shape.tool_result.draw(rng))),
                shape.answer.draw(rng),
                rng.expovariate(1 / shape.tool_time_s) if shape.tool_time_s else 0.0,
            )
            for _ in range(shape.turns.draw(rng) - 1)
        ]
        sessions.append(Session(f"session-{number}", kind, systems[kind], (first, *rest), tuple(maker.units(shape.summary))))
    return sessions


class IdealCache:
    """Which whole blocks of a sequence have been seen before; never forgets. Blocks are chained, so equal text elsewhere is no hit."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._seen: set[int] = set()

    def hit(self, units: Sequence[Any]) -> int:
        """Units at the start that are cached: whole blocks, and never the last unit, whose logits must be computed."""
        count = 0
        for link in self._links(units[: len(units) - 1]):
            if link not in self._seen:
                break
            count += self._block
        return count

    def add(self, units: Sequence[Any]) -> None:
        self._seen.update(self._links(units))

    def _links(self, units: Sequence[Any]) -> list[int]:
        links, before = [], 0
        for start in range(0, len(units) // self._block * self._block, self._block):
            before = hash((before, tuple(units[start : start + self._block])))
            links.append(before)
        return links


@dataclass(slots=True)
class Conversation:
    """The context of a session while it runs: what is sent, and the same as a flat sequence for the ideal cache."""

    session: Session
    form: Literal["ids", "chat"]
    units: list[Any] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    is_compacted: bool = False
    """The context was just compacted and nothing has followed yet."""

    def __post_init__(self) -> None:
        self._open(self.session.system)

    def _open(self, system: Sequence[Any]) -> None:
        self.units = list(system)
        self.messages = [{"role": "system", "content": " ".join(map(str, system))}]

    def append(self, turn: Turn, index: int) -> None:
        self.units += turn.append
        if self.form == "ids":
            return
        content = " ".join(turn.append)
        # After compaction the tool call that a result would answer is gone, so the result arrives as a user's message.
        if index == 0 or self.is_compacted:
            self.messages.append({"role": "user", "content": content})
        else:
            self.messages.append({"role": "tool", "tool_call_id": f"call_{index - 1}", "content": content})
        self.is_compacted = False

    def compact(self) -> None:
        self._open(self.session.system)
        self.units += self.session.summary
        if self.form == "chat":
            self.messages.append({"role": "user", "content": " ".join(self.session.summary)})
        self.is_compacted = True

    def answered(self, record: Record, index: int) -> None:
        """Put the server's own answer into the context, and the tool call that leads to the next turn."""
        self.units += list(record.token_ids) if record.token_ids is not None else record.text.split()
        if self.form == "chat":
            call = {"name": TOOLS[index % len(TOOLS)], "arguments": f'{{"query": "{WORDS[index % len(WORDS)]}"}}'}
            calls = [{"id": f"call_{index}", "type": "function", "function": call}]
            self.messages.append({"role": "assistant", "content": record.text, "tool_calls": calls})

    def prompt(self) -> list[int] | list[dict[str, Any]]:
        return list(self.units) if self.form == "ids" else list(self.messages)


@dataclass(frozen=True, slots=True)
class TurnRecord:
    record: Record
    session: str
    index: int
    ideal_tokens: float
    """Prompt tokens that a perfect cache would have had, in the server's tokens."""


async def run_agents(
    sessions: Sequence[Session],
    send: Callable[[Ask], Awaitable[Record]],
    *,
    users: int,
    shape: AgentShape,
    form: Literal["ids", "chat"],
    block: int = 256,
    pace: Pace | None = None,
    on_done: Callable[[Record], None] | None = None,
) -> list[TurnRecord]:
    """`users` run at once and take sessions in order until none is left. A failed turn ends its session."""
    pace, ideal, waiting = pace or RealPace(), IdealCache(block), list(reversed(sessions))
    done: list[TurnRecord] = []

    async def user() -> None:
        while waiting:
            await _run_session(waiting.pop(), send, shape, form, ideal, pace, done, on_done)

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())
    return done


async def _run_session(
    session: Session,
    send: Callable[[Ask], Awaitable[Record]],
    shape: AgentShape,
    form: Literal["ids", "chat"],
    ideal: IdealCache,
    pace: Pace,
    done: list[TurnRecord],
    on_done: Callable[[Record], None] | None,
) -> None:
    talk = Conversation(session, form)
    for index, turn in enumerate(session.turns):
        if turn.pause_s:
            await pace.sleep(turn.pause_s)
        if len(talk.units) + len(turn.append) + turn.max_tokens > shape.max_context:
            talk.compact()
        talk.append(turn, index)
        share = ideal.hit(talk.units) / len(talk.units)
        sent = list(talk.units)
        record = await send(Ask(prompt=talk.prompt(), max_tokens=turn.max_tokens, label=session.name))
        done.append(TurnRecord(record, session.name, index, share * (record.prompt_tokens or 0)))
        if on_done:
            on_done(record)
        if not record.is_ok:
            return
        talk.answered(record, index)
        # The last token's own KV is never computed, so the answer counts up to the one before.
        ideal.add([*sent, *talk.units[len(sent) : -1]] if len(talk.units) > len(sent) else sent)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSummary:
    sessions: int
    turns: int
    failed: int
    duration_s: float
    logical_tokens: int
    """All prompt tokens."""
    cached_tokens: int | None
    """None when the server reports no cached tokens; then fresh tokens and the hit rate are unknown too."""
    fresh_tokens: int | None
    output_tokens: int
    hit_rate: float | None
    ideal_hit_rate: float
    logical_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Spread | None
    later_ttft_ms: Spread | None
    """Of all turns but a session's first: what a warm prefix is worth."""
    tpot_ms: Spread | None
    tokens_per_s_per_user: Spread | None
    """One value a session: output tokens over the time spent waiting for them, tools left out."""
    request_tokens_per_s: Spread | None
    """One value a turn: 1 / TPOT, how fast the text runs once it runs."""


def summarise_agents(turns: Sequence[TurnRecord]) -> AgentSummary:
    good = [t for t in turns if t.record.is_ok]
    records = [t.record for t in good]
    start = min((t.record.sent_s for t in turns), default=0.0)
    duration = max((t.record.ended_s for t in turns), default=0.0) - start
    logical, output = sum(r.prompt_tokens or 0 for r in records), sum(r.output_tokens for r in records)
    knows = any(r.cached_tokens is not None for r in records)
    cached = sum(r.cached_tokens or 0 for r in records) if knows else None
    speeds = [t for r in records if (t := tpot_s(r))]
    return AgentSummary(
        sessions=len({t.session for t in turns}),
        turns=len(turns),
        failed=len(turns) - len(good),
        duration_s=duration,
        logical_tokens=logical,
        cached_tokens=cached,
        fresh_tokens=None if cached is None else logical - cached,
        output_tokens=output,
        hit_rate=None if cached is None or not logical else cached / logical,
        ideal_hit_rate=math.fsum(t.ideal_tokens for t in good) / logical if logical else 0.0,
        logical_tokens_per_s=logical / duration if duration > 0 else 0.0,
        output_tokens_per_s=output / duration if duration > 0 else 0.0,
        ttft_ms=spread([t * 1e3 for r in records if (t := ttft_s(r)) is not None]),
        later_ttft_ms=spread([s * 1e3 for t in good if t.index > 0 and (s := ttft_s(t.record)) is not None]),
        tpot_ms=spread([t * 1e3 for t in speeds]),
        tokens_per_s_per_user=spread(_user_speeds(good), (1, 10, 50)),
        request_tokens_per_s=spread([1 / t for t in speeds], (1, 10, 50)),
    )


def _user_speeds(turns: Sequence[TurnRecord]) -> list[float]:
    tokens: dict[str, int] = {}
    waited: dict[str, float] = {}
    for turn in turns:
        tokens[turn.session] = tokens.get(turn.session, 0) + turn.record.output_tokens
        waited[turn.session] = waited.get(turn.session, 0.0) + (e2e_s(turn.record) or 0.0)
    return [tokens[name] / waited[name] for name in tokens if waited[name] > 0]
