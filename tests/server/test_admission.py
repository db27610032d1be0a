# SPDX-License-Identifier: Apache-2.0
"""Who may enter: a full queue is 503 with a wait that was measured, a used-up allowance 429, a slow body 408; and nothing stays counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.support import PLAIN, asking, config, engine_of
from tests.server.test_lifetime import CHAT, LONG, RAW, Connection, until
from tests.server.test_refusals import check_envelope
from whalefall.server.admission import Allowance, Backlog
from whalefall.server.app import create_app

MESSAGES = "/v1/messages"


def test_wait_is_the_waiting_tokens_at_the_measured_rate() -> None:
    backlog = Backlog()
    assert backlog.wait_s == 1.0
    for _ in range(10):
        backlog.enter(1000, 0.0)
    for second in (2, 4, 6):
        backlog.leave(1000, float(second), was_served=True)
    assert backlog.num_tokens == 7000 and backlog.tokens_per_s == pytest.approx(500, rel=0.05)
    assert backlog.wait_s == pytest.approx(14, rel=0.05)


def test_idle_time_and_readers_that_left_do_not_slow_the_measured_rate() -> None:
    backlog = Backlog()
    backlog.enter(100, 0.0)
    backlog.leave(100, 1.0, was_served=True)
    backlog.enter(100, 1000.0)
    backlog.enter(100, 1000.0)
    backlog.leave(100, 1000.5, was_served=False)
    backlog.leave(100, 1001.0, was_served=True)
    assert backlog.tokens_per_s == pytest.approx(100) and (backlog.num_requests, backlog.num_tokens) == (0, 0)


def test_allowance_fills_evenly_and_holds_one_minute() -> None:
    bucket = Allowance(60, 0.0)
    bucket.take(90)
    assert bucket.wait_s(0.0) == 31 and bucket.wait_s(30.0) == 1 and bucket.wait_s(31.0) == 0
    assert bucket.wait_s(10_000.0) == 0
    bucket.take(60)
    assert bucket.wait_s(10_000.0) == 1


@pytest.mark.parametrize("limits", [{"max_num_queued_reqs": 2}, {"max_num_queued_tokens": 10}])
@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue_is_503_in_each_protocol_and_opens_again(limits: dict[str, int], stream: bool) -> None:
    engine = engine_of("a")
    engine.gate.clear()
    app = create_app(engine, config(**limits))
    waiting = [Connection(app, RAW, {"prompt": "wait"}) for _ in range(2)]
    await until(lambda: len(engine.open_requests) == 2)
    hi = [{"role": "user", "content": "hi"}]
    for path, body in ((CHAT, PLAIN), (RAW, {"prompt": "another"}), (MESSAGES, {"messages": hi, "max_tokens": 3})):
        late = Connection(app, path, {**body, "stream": stream})
        await late.task
        assert late.sent[0]["status"] == 503 and "overloaded_error" in late.text and "limit" in late.text
        assert int(dict(late.sent[0]["headers"])[b"retry-after"]) >= 1
    assert app.state.door.gate.num_refused == 3 and len(engine.seen) == 2
    engine.gate.set()
    await asyncio.gather(*(connection.task for connection in waiting))
    after = Connection(app, RAW, {"prompt": "another"})
    await after.task
    assert after.sent[0]["status"] == 200
    backlog = app.state.door.gate.backlog
    assert (backlog.num_requests, backlog.num_tokens) == (0, 0)


async def test_empty_queue_takes_a_prompt_longer_than_the_token_limit() -> None:
    async with asking(engine_of("a"), max_num_queued_tokens=10) as client:
        assert (await client.post(RAW, json={"prompt": "x" * 100})).status_code == 200


async def test_reader_that_leaves_leaves_the_queue() -> None:
    engine = engine_of("a")
    engine.gate.clear()
    app = create_app(engine, config())
    connection = Connection(app, CHAT, {**PLAIN, "n": 3})
    await until(lambda: engine.open_requests)
    assert app.state.door.gate.backlog.num_requests == 1
    await connection.hang_up()
    assert (app.state.door.gate.backlog.num_requests, app.state.door.gate.backlog.num_tokens) == (0, 0)


async def test_each_key_has_its_own_allowance_of_requests() -> None:
    async with asking(engine_of("a"), api_keys=("one", "two"), max_requests_per_minute=2) as client:

        async def ask(key: str) -> Any:
            return await client.post(RAW, json={"prompt": "x"}, headers={"Authorization": f"Bearer {key}"})

        assert [(await ask("one")).status_code for _ in range(2)] == [200, 200]
        refused = await ask("one")
        check_envelope(refused, 429, None)
        assert 1 <= int(refused.headers["retry-after"]) <= 30 and refused.json()["error"]["type"] == "rate_limit_error"
        assert (await ask("two")).status_code == 200
        assert (await ask("three")).status_code == 401


async def test_allowance_of_tokens_counts_prompts_and_answers() -> None:
    async with asking(engine_of("a", "b", "c"), max_tokens_per_minute=10) as client:
        assert (await client.post(RAW, json={"prompt": "x" * 5})).status_code == 200  # 6 of the prompt, 4 of the answer
        check_envelope(await client.post(RAW, json={"prompt": "x"}), 429, None)


async def test_slow_body_is_408() -> None:
    async def never() -> Any:
        yield b'{"prompt": '
        await asyncio.sleep(60)

    async with asking(engine_of("a"), body_timeout_s=0.02) as client:
        check_envelope(await client.post(RAW, content=never()), 408, None)
        assert (await client.post(RAW, json={"prompt": "x"})).status_code == 200


async def test_time_limit_ends_an_answer_under_way_and_refuses_one_not_begun() -> None:
    engine = engine_of(*LONG, step_s=0.001)
    async with asking(engine, request_timeout_s=0.05) as client:
        answer = await client.post(RAW, json={"prompt": "x", "max_tokens": 2000})
        assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "abort"
    slow = engine_of("a", step_s=0.1)
    async with asking(slow, request_timeout_s=0.02) as client:
        refused = await client.post(RAW, json={"prompt": "x"})
        check_envelope(refused, 503, None)
        assert "request_timeout_s" in refused.text and slow.open_requests == set()
