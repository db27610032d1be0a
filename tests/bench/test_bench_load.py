# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics

import pytest

from whalefall.bench.load import arrival_times, run_load
from whalefall.bench.mixes import MIXES, Lengths, PromptMaker, make_asks, parse_mix, read_asks
from whalefall.bench.openai import Ask, Target, send
from whalefall.bench.records import Record


def test_arrivals_come_from_the_seed_and_are_poisson() -> None:
    times = arrival_times(20_000, 50.0, 1.0, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times == arrival_times(20_000, 50.0, 1.0, seed=3)
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    # An exponential gap has the deviation of its mean.
    assert statistics.pstdev(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert times[0] == 0.0


def test_burstiness_widens_the_gaps_and_keeps_the_rate() -> None:
    times = arrival_times(20_000, 10.0, 0.25, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.2, rel=0.1)


def test_infinite_rate_sends_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, 0) == [0, 0, 0]


async def test_requests_leave_at_their_times_whatever_the_answers_take(pace) -> None:
    sent: list[int] = []

    async def slow(ask: Ask) -> Record:
        sent.append(ask.max_tokens)
        await asyncio.sleep(0.01)
        return Record(sent_s=pace.now_s(), ended_s=pace.now_s())

    asks = [Ask(prompt="", max_tokens=i) for i in range(4)]
    records = await run_load(asks, slow, [0.0, 1.0, 1.0, 5.0], pace=pace)
    assert sent == [0, 1, 2, 3]
    assert pace.slept == pytest.approx([1.0, 4.0])
    assert len(records) == 4


async def test_concurrency_is_never_passed_and_order_is_kept(server) -> None:
    target = Target(address=server.address, endpoint="completions", model="stub")
    asks = [Ask(prompt="", max_tokens=i + 1) for i in range(20)]
    records = await run_load(asks, lambda ask: send(target, ask), [0.0] * 20, max_concurrency=3)
    assert server.most_under_way <= 3
    assert [r.output_tokens for r in records] == list(range(1, 21))


def test_prompts_come_from_the_seed_and_have_the_drawn_lengths() -> None:
    def make(seed: int) -> list[Ask]:
        rng = random.Random(seed)
        return make_asks(parse_mix("fixed", 33, 9), 5, PromptMaker(rng, "ids", 500, "completions"), rng)

    assert make(1) == make(1) != make(2)
    assert all(len(ask.prompt) == 33 and ask.max_tokens == 9 for ask in make(1))
    assert all(100 <= token < 500 for ask in make(1) for token in ask.prompt)


def test_mixes_are_drawn_by_weight_and_share_their_prefix() -> None:
    rng = random.Random(5)
    asks = make_asks(parse_mix("shared-prefix=3,chat=1", output_len=4), 400, PromptMaker(rng, "text", 0, "completions"), rng)
    shared = [ask.prompt.split() for ask in asks if ask.label == "shared-prefix"]
    assert len(shared) == pytest.approx(300, abs=40)
    assert len({tuple(words[:2_048]) for words in shared}) == 1
    assert len({tuple(words[2_048:]) for words in shared}) == len(shared)
    assert {ask.max_tokens for ask in asks} == {4}


def test_unknown_mix_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"mix is 'chit', must be one of fixed, chat, code.*did you mean 'chat'"):
        parse_mix("chit=1")


def test_ids_need_the_completions_endpoint() -> None:
    with pytest.raises(ValueError, match="completions"):
        PromptMaker(random.Random(0), "ids", 1_000, "chat")


def test_every_mix_stays_within_its_bounds() -> None:
    rng = random.Random(0)
    for mix in MIXES.values():
        drawn = [mix.prompt.draw(rng) for _ in range(500)]
        assert mix.prompt.low <= min(drawn) and max(drawn) <= mix.prompt.high
        assert statistics.median(drawn) == pytest.approx(mix.prompt.median, rel=0.25)
    assert Lengths(7).draw(rng) == 7


def test_dataset_lines_become_requests_in_a_circle(tmp_path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "one", "max_tokens": 3}\n\n{"messages": [{"role": "user", "content": "two"}], "prompt": "two"}\n')
    asks = read_asks(path, 3, "completions", default_tokens=8)
    assert [(a.prompt, a.max_tokens) for a in asks] == [("one", 3), ("two", 8), ("one", 3)]
    assert read_asks(path, 1, "chat", 8)[0].prompt == [{"role": "user", "content": "one"}]
    path.write_text('{"text": "?"}\n')
    with pytest.raises(ValueError, match=r"mine.jsonl:1"):
        read_asks(path, 1, "completions", 8)
