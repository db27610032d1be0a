# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from dataclasses import replace

import pytest

from whalefall.bench.agent import AgentShape, IdealCache, make_sessions, run_agents, summarise_agents
from whalefall.bench.mixes import Lengths, PromptMaker
from whalefall.bench.openai import Ask
from whalefall.bench.records import Arrival, Record

SHAPE = AgentShape(
    system=40, kinds=1, task=Lengths(10), turns=Lengths(3), answer=Lengths(6), tool_result=Lengths(20), tool_time_s=2.0, max_context=10_000
)


class PerfectEngine:
    """Answers with fixed ids and reports exactly what a cache that never forgets would have hit, token by token."""

    def __init__(self, block: int, pace) -> None:
        self.block, self.pace, self.prompts, self.seen = block, pace, [], []

    async def send(self, ask: Ask) -> Record:
        prompt, sent = list(ask.prompt), self.pace.now_s()
        self.prompts.append(prompt)
        await self.pace.sleep(0.5)
        ids = tuple(range(1_000 + len(self.prompts) * 10, 1_000 + len(self.prompts) * 10 + ask.max_tokens))
        common = max((self._common(prompt[:-1], old) for old in self.seen), default=0)
        self.seen.append([*prompt, *ids[:-1]])
        arrivals = tuple(Arrival(sent + 0.5 + i, 1) for i in range(len(ids)))
        return Record(
            sent_s=sent,
            ended_s=arrivals[-1].at_s,
            arrivals=arrivals,
            prompt_tokens=len(prompt),
            cached_tokens=common // self.block * self.block,
            token_ids=ids,
            label=ask.label,
        )

    @staticmethod
    def _common(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def sessions(count: int, shape: AgentShape = SHAPE, seed: int = 0):
    rng = random.Random(seed)
    return make_sessions(count, shape, PromptMaker(rng, "ids", 900, "completions"), rng)


async def test_prompts_grow_by_answers_and_tool_results(pace) -> None:
    engine = PerfectEngine(4, pace)
    await run_agents(sessions(1), engine.send, users=1, shape=SHAPE, form="ids", block=4, pace=pace)
    assert [len(p) for p in engine.prompts] == [50, 50 + 6 + 20, 50 + 2 * 26]
    assert engine.prompts[1][:56] == [*engine.prompts[0], *range(1_010, 1_016)]


@pytest.mark.parametrize("block", [1, 4, 16])
async def test_ideal_equals_a_cache_that_never_forgets(pace, block: int) -> None:
    engine = PerfectEngine(block, pace)
    turns = await run_agents(sessions(6), engine.send, users=1, shape=SHAPE, form="ids", block=block, pace=pace)
    assert [t.ideal_tokens for t in turns] == pytest.approx([t.record.cached_tokens for t in turns])
    summary = summarise_agents(turns)
    assert summary.hit_rate == pytest.approx(summary.ideal_hit_rate)
    assert summary.fresh_tokens == summary.logical_tokens - summary.cached_tokens
    assert 0.5 < summary.ideal_hit_rate < 1


async def test_compaction_keeps_the_system_prompt_and_breaks_the_rest(pace) -> None:
    shape = replace(SHAPE, turns=Lengths(8), max_context=110, summary=5)
    engine = PerfectEngine(1, pace)
    turns = await run_agents(sessions(1, shape), engine.send, users=1, shape=shape, form="ids", block=1, pace=pace)
    lengths = [len(p) for p in engine.prompts]
    assert max(lengths) + 6 <= 110
    shrunk = next(i for i in range(1, 8) if lengths[i] < lengths[i - 1])
    assert lengths[shrunk] == 40 + 5 + 20
    assert turns[shrunk].record.cached_tokens == 40


async def test_sessions_run_side_by_side_and_tools_take_their_time(pace) -> None:
    engine = PerfectEngine(4, pace)
    turns = await run_agents(sessions(5), engine.send, users=2, shape=SHAPE, form="ids", block=4, pace=pace)
    assert len(turns) == 15
    assert sum(s != 0.5 for s in pace.slept) == 10


async def test_failed_turn_ends_its_session_only(pace) -> None:
    engine = PerfectEngine(4, pace)

    async def send(ask: Ask) -> Record:
        if ask.label == "session-1" and len(ask.prompt) > 50:
            return Record(sent_s=0.0, ended_s=0.0, error="500: no")
        return await engine.send(ask)

    summary = summarise_agents(await run_agents(sessions(3), send, users=1, shape=SHAPE, form="ids", block=4, pace=pace))
    assert (summary.sessions, summary.turns, summary.failed) == (3, 3 + 2 + 3, 1)


async def test_chat_form_holds_calls_and_their_results_together(pace) -> None:
    seen: list[list[dict]] = []

    async def send(ask: Ask) -> Record:
        seen.append(ask.prompt)
        return Record(sent_s=0.0, ended_s=1.0, arrivals=(Arrival(1.0, 2),), prompt_tokens=9, text="an answer")

    rng = random.Random(1)
    planned = make_sessions(1, SHAPE, PromptMaker(rng, "text", 0, "chat"), rng)
    await run_agents(planned, send, users=1, shape=SHAPE, form="chat", pace=pace)
    assert [m["role"] for m in seen[2]] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert seen[2][3]["tool_call_id"] == seen[2][2]["tool_calls"][0]["id"]
    assert seen[2][2]["content"] == "an answer"


async def test_user_speed_leaves_tool_time_out(pace) -> None:
    engine = PerfectEngine(4, pace)
    summary = summarise_agents(await run_agents(sessions(1), engine.send, users=1, shape=SHAPE, form="ids", block=4, pace=pace))
    # Each of three turns waits 0.5 s for the first of 6 tokens and 5 s for the rest.
    assert summary.tokens_per_s_per_user.mean == pytest.approx(18 / (3 * 5.5))
    assert summary.request_tokens_per_s.mean == pytest.approx(1.0)
    assert summary.later_ttft_ms.count == 2


def test_ideal_cache_chains_its_blocks() -> None:
    cache = IdealCache(2)
    cache.add([1, 2, 3, 4, 5])
    assert cache.hit([1, 2, 3, 4, 9]) == 4
    assert cache.hit([1, 2, 3, 4]) == 2, "the last unit must be computed, so its block is no hit"
    assert cache.hit([3, 4, 1, 2, 0]) == 0, "the same block elsewhere is no hit"


def test_unreported_cache_is_unknown_rather_than_zero() -> None:
    from whalefall.bench.agent import TurnRecord

    record = Record(sent_s=0.0, ended_s=1.0, arrivals=(Arrival(1.0, 2),), prompt_tokens=9)
    summary = summarise_agents([TurnRecord(record, "s", 0, 4.5)])
    assert (summary.hit_rate, summary.fresh_tokens, summary.ideal_hit_rate) == (None, None, 0.5)
